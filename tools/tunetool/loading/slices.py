"""Which elements of a tensor a rank has, by the placements of DTensor: ``Shard`` cuts as ``torch.chunk`` does, and
``_StridedShard`` takes a chunk of each of several groups. Pure arithmetic; no torch here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Runs = tuple[tuple[int, int], ...]
"""Ascending ranges [start, stop) of indices of one dimension, none empty, none adjacent."""


class Cut(NamedTuple):
    """One placement on one dimension of a mesh: of ``ranks`` parts along ``dim`` the one of ``rank``; ``groups``: of a
    ``_StridedShard``, the groups from each of which a chunk is taken, else 1."""

    dim: int
    rank: int
    ranks: int
    groups: int = 1


class Box(NamedTuple):
    """Elements that are adjacent in every dimension: at ``offsets`` of the whole tensor and ``at`` of the part."""

    offsets: tuple[int, ...]
    at: tuple[int, ...]
    lengths: tuple[int, ...]


class Part(NamedTuple):
    """The elements with these indices in each dimension."""

    runs: tuple[Runs, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(length(runs) for runs in self.runs)

    def boxes(self) -> Iterator[Box]:
        """The part in boxes, in the order of their elements."""
        placed = [list(zip(runs, _starts(runs), strict=True)) for runs in self.runs]
        for chosen in itertools.product(*placed):
            yield Box(
                tuple(start for (start, _), _ in chosen),
                tuple(at for _, at in chosen),
                tuple(stop - start for (start, stop), _ in chosen),
            )


def length(runs: Runs) -> int:
    """Number of indices."""
    return sum(stop - start for start, stop in runs)


def _starts(runs: Runs) -> Iterator[int]:
    at = 0
    for start, stop in runs:
        yield at
        at += stop - start


def part_of(shape: Sequence[int], cuts: Sequence[Cut]) -> Part:
    """What is left of a tensor after ``cuts``, one after another as DTensor applies placements.

    FSDP2 over tensor parallelism says ``_StridedShard`` and then ``Shard``, and means the opposite order. Where both
    orders do not give the same, and where no order is known, raises ``ValueError`` with the reason.
    """
    runs: list[Runs] = []
    for dim, size in enumerate(shape):
        own = [cut for cut in cuts if cut.dim == dim]
        result = _after(size, own)
        if any(cut.groups > 1 for cut in own[:-1]):
            first, *rest = own
            if len(rest) != 1 or rest[0].groups > 1 or rest[0].ranks != first.groups:
                raise ValueError(f"dimension {dim} has a `_StridedShard` before other placements than FSDP2's")
            if _after(size, [rest[0], first._replace(groups=1)]) != result:
                raise ValueError(
                    f"the {size} elements of dimension {dim} are not cut evenly enough for `_StridedShard`"
                )
        runs.append(result)
    return Part(tuple(runs))


def _after(size: int, cuts: Sequence[Cut]) -> Runs:
    runs: Runs = ((0, size),) if size else ()
    for cut in cuts:
        total = length(runs)
        kept: list[tuple[int, int]] = []
        for group in range(cut.groups):
            first, last = chunk(total, cut.groups, group)
            begin, end = chunk(last - first, cut.ranks, cut.rank)
            kept += _between(runs, first + begin, first + end)
        runs = _joined(kept)
    return runs


def chunk(size: int, count: int, index: int) -> tuple[int, int]:
    """The range [start, stop) of chunk ``index`` when ``size`` elements are cut into ``count``: all as large as the
    first, but for the last ones, which may be smaller or empty. As ``torch.chunk``, with the empty ones."""
    step = -(-size // count)
    start = min(index * step, size)
    return start, min(start + step, size)


def _between(runs: Runs, first: int, last: int) -> Iterator[tuple[int, int]]:
    """The indices at the places [first, last) of ``runs``."""
    for (start, stop), at in zip(runs, _starts(runs), strict=True):
        begin, end = max(first - at, 0), min(last - at, stop - start)
        if begin < end:
            yield start + begin, start + end


def _joined(runs: Sequence[tuple[int, int]]) -> Runs:
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)
