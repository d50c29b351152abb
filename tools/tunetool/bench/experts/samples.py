"""The readings of every row, by round. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tunetool.bench.experts.trace import Pattern
from tunetool.measure.evidence import Counted
from tunetool.measure.sampling import Repeats
from tunetool.node.machine.block_stack import BlockStack

Mode = Literal["direct", "buffered"]
MODES: tuple[Mode, ...] = ("direct", "buffered")
TARGET = "target"
"""Name of the directory whose experts are cached; the others are single drives."""


@dataclass(frozen=True)
class Reading:
    """One pass over the experts, or one replay of a trace."""

    seconds: float
    claimed_bytes: int
    """That were read from the file."""
    wanted_bytes: int
    """Of all experts that were wanted; those in the cache were not read."""
    latencies: Sequence[float]
    """Seconds of each expert, or of each step of a trace."""
    counted: Counted | None
    moment: float
    hits: int = 0
    wanted: int = 0
    wrong: int = 0
    """Experts that were not those that were wanted."""
    cached_bytes: tuple[int, int] = (0, 0)
    """That the page cache held of the file before and after."""

    @property
    def bandwidth(self) -> float:
        """Bytes of wanted experts per second."""
        return self.wanted_bytes / self.seconds

    def percentile(self, share: float) -> float:
        """The latency that ``share`` of all do not exceed (nearest rank)."""
        return sorted(self.latencies)[max(0, math.ceil(share * len(self.latencies)) - 1)]


@dataclass
class Row:
    """The readings of one way to get experts."""

    place: str
    stack: BlockStack
    mode: Mode = "direct"
    pattern: Pattern | None = None
    """None: all experts in random order, without a cache."""
    slots: int = 0
    """Experts that the cache holds."""
    expected: float = 0.0
    """Hit rate that the cache is expected to have."""
    misread: int = 0
    """Experts that had other bytes when every page was looked at before the rounds; with any there are no rounds."""
    readings: dict[int, Reading] = field(default_factory=dict)
    """By round."""
    repeated: Repeats = field(default_factory=Repeats)

    @property
    def key(self) -> str:
        """Its part of the figures' names."""
        return f"{self.place}.{self.mode}" if self.pattern is None else f"{self.pattern}.cached-{self.slots}"

    @property
    def medium(self) -> str:
        """Where the bytes come from."""
        return f"{self.stack.medium}, cache in DRAM" if self.slots else self.stack.medium

    def seconds(self) -> dict[int, float]:
        """By round."""
        return {number: reading.seconds for number, reading in self.readings.items()}
