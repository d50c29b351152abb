"""The readings of every row, by round. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tunetool.measure import Direction
from tunetool.measure.evidence import Counted
from tunetool.measure.sampling import Repeats
from tunetool.node.machine.block_stack import BlockStack


class Cell(NamedTuple):
    """One compared thing."""

    layout: str
    drives: int
    engine: str
    direction: Direction

    @property
    def key(self) -> str:
        """For people, and for what is compared with it."""
        return ".".join(self.labels.values())

    @property
    def labels(self) -> dict[str, str]:
        """Of the figures."""
        return {
            "layout": self.layout,
            "drives": str(self.drives),
            "io_engine": self.engine,
            "direction": self.direction,
        }


@dataclass(frozen=True)
class Reading:
    """One sample: what the program claims, and what each drive counted."""

    claimed_bytes: int
    seconds: float
    """Of a write until it was synced."""
    counted: Counted | None
    moment: float
    cores: float | None = None
    """How many cores' worth of time the programs spent."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.claimed_bytes / self.seconds


@dataclass
class Row:
    """The readings of one cell."""

    cell: Cell
    stack: BlockStack
    program: str
    """Name and version."""
    threads: int
    """That move data."""
    ceiling: list[float] = field(default_factory=list)
    """Bytes per second that the program reaches without storage."""
    readings: dict[int, Reading] = field(default_factory=dict)
    """By round."""
    repeated: Repeats = field(default_factory=Repeats)

    def seconds_a_byte(self, drives: int = 1) -> dict[int, float]:
        """By round; of ``drives`` such rows at the same time."""
        return {number: 1 / (drives * reading.bandwidth) for number, reading in self.readings.items()}

    def drive_shares(self) -> tuple[float, float]:
        """The least and the greatest share of a round's bytes that a drive moved, times the number of drives."""
        shares = []
        for reading in self.readings.values():
            if reading.counted is not None and reading.counted.counted_bytes:
                whole = reading.counted.counted_bytes / len(self.stack.counts)
                moved = [reading.counted.devices[name].moved_bytes(self.cell.direction) for name in self.stack.counts]
                shares += [each / whole for each in moved]
        return (min(shares), max(shares)) if shares else (0.0, 0.0)
