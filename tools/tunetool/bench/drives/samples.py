"""The readings of every row, by round. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tunetool.bench.drives.layouts import LAYOUTS
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

    @property
    def copies(self) -> int:
        """Of each byte, on different drives. Of a standing volume nobody asks: 1."""
        layout = LAYOUTS.get(self.cell.layout)
        return layout.copies(self.cell.drives) if layout else 1

    @property
    def due(self) -> int:
        """Bytes that the drives have to count for each claimed one: a read takes one copy, a write makes all."""
        return self.copies if self.cell.direction == "write" else 1

    def seconds_a_byte(self, drives: int = 1) -> dict[int, float]:
        """By round; of ``drives`` such rows at the same time."""
        return {number: 1 / (drives * reading.bandwidth) for number, reading in self.readings.items()}

    def drive_shares(self) -> tuple[float, float]:
        """The least and the greatest share of a round's bytes that a drive moved, times the number of drives."""
        shares = [each * len(moved) / sum(moved) for _, moved in self._on_drives() if sum(moved) for each in moved]
        return (min(shares), max(shares)) if shares else (0.0, 0.0)

    def drive_bytes(self) -> list[float]:
        """Of each round: the bytes that the drives themselves counted, for each claimed one."""
        return [sum(moved) / claimed for claimed, moved in self._on_drives()]

    def _on_drives(self) -> Iterator[tuple[int, list[int]]]:
        """Of each round: the bytes claimed, and those that each drive counted; of a mirror too, whose claim is compared
        with its array's counters."""
        names = [leaf.name for leaf in self.stack.leaves]
        for reading in self.readings.values():
            if names and (counted := reading.counted) is not None:
                yield reading.claimed_bytes, [counted.devices[name].moved_bytes(self.cell.direction) for name in names]
