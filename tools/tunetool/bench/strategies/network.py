"""The order for a measurement of the network, and each rank's answer. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MODULE = "tunetool.bench.strategies.network_rank"
FILE = "network.json"


@dataclass(frozen=True)
class Order:
    """The order to the ranks."""

    model: str
    """The model's directory on the node; its config.json is copied back."""
    device: str
    hidden: int
    """Width of the small computation."""
    seconds: float
    """Approximate seconds for all collectives together."""


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured. ``points``: by collective, pairs of bytes and seconds of each run, the slowest rank's."""

    rank: int
    host: str
    backend: str
    device: str
    work: list[float]
    """Seconds of the small computation, each rank's own."""
    memory_bytes: int
    """That a rank can have: its GPU's, or its share of what is free on the node."""
    points: dict[str, list[tuple[int, list[float]]]] = field(default_factory=dict)
    queued: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    """Seconds of the smallest all-reduce, of one number."""
    configuration: dict[str, Any] | None = None
    """Rank 0's config.json."""
    communicator: float = 0.0
    """Seconds from the ranks' meeting to the end of their first collective."""
