"""Seconds of a collective by its size: a latency, and a time for each byte. Pure.

The model is Hockney's (Parallel Computing 20 (1994) 389), of a message, here of a whole collective on one layout: what
a ring adds up of single messages is in its two numbers (Thakur, Rabenseifner, Gropp, IJHPCA 19 (2005) 49).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunetool.advise.communication import Call, Kind, bus_factor


@dataclass(frozen=True)
class Fit:
    """``latency`` + size x ``per_byte``, seconds; ``size`` in bytes of the whole vector."""

    latency: float
    per_byte: float
    worst: float
    """The largest difference of a measured point, as a fraction of it."""

    def seconds(self, size: int) -> float:
        """Of one collective."""
        return self.latency + size * self.per_byte

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the vector per second without latency, as for a very large vector (nccl-tests: algbw)."""
        return 1 / self.per_byte if self.per_byte else float("inf")

    def bus_bandwidth(self, kind: Kind, world: int) -> float:
        """Bytes per second on each link, comparable with the link's own speed (nccl-tests: busbw)."""
        return self.algorithm_bandwidth * bus_factor(kind, world)


@dataclass(frozen=True)
class Network:
    """The measured network between the ranks of one layout."""

    fits: Mapping[Kind, Fit]
    queued: float
    """Seconds that a small all-gather adds which is started before the one ahead of it is done."""

    def seconds(self, call: Call) -> float:
        """Of a collective that nothing is ahead of."""
        return self.fits[call.kind].seconds(call.size)

    def behind(self, call: Call) -> float:
        """Of one that queues."""
        return min(self.seconds(call), self.queued + call.size * self.fits[call.kind].per_byte)


def fit(points: Sequence[tuple[int, float]]) -> Fit:
    """Least squares over (bytes, seconds), each weighted so that relative errors count; neither number below zero.

    At least one point, none of zero seconds.
    """
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    sizes = sum(w * size for w, (size, _) in zip(weights, points, strict=True))
    squares = sum(w * size**2 for w, (size, _) in zip(weights, points, strict=True))
    times = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True))
    products = sum(w * size * seconds for w, (size, seconds) in zip(weights, points, strict=True))
    determinant = total * squares - sizes**2
    per_byte = (total * products - sizes * times) / determinant if determinant > 0 else 0.0
    latency = (times - per_byte * sizes) / total
    if per_byte < 0:
        latency, per_byte = times / total, 0.0
    elif latency < 0:
        latency, per_byte = 0.0, products / squares
    worst = max(abs(latency + per_byte * size - seconds) / seconds for size, seconds in points)
    return Fit(latency, per_byte, worst)
