"""The steps of every row, by round. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunetool.bench.offload.swap_handles import union
from tunetool.measure import Direction
from tunetool.measure.evidence import Counted, Judgement
from tunetool.measure.sampling import Repeats
from tunetool.node.machine.block_stack import BlockStack

DIRECTIONS: tuple[Direction, ...] = ("read", "write")
DRAM = "DRAM"
"""Medium, and name of the row, of states in the node's memory."""
NEAR = 0.005
"""Largest difference of a loss from that with states in DRAM, as a part of it. The same Adam adds the same numbers;
what may differ is the order of additions on a GPU. Wrong gradients made 10 % in three steps
(docs/guides/ds-config.md)."""


@dataclass(frozen=True)
class Moved:
    """What the swappers moved in one direction in a step, over all ranks."""

    claimed_bytes: int
    waited: float
    """Seconds for which a rank waited for it, mean over the ranks."""
    in_flight: float
    """Seconds for which any transfer was in flight; computation may have gone on."""
    counted: Counted | None = None
    moment: float = 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes per second while transfers were in flight; 0 without any."""
        return self.claimed_bytes / self.in_flight if self.in_flight else 0.0


@dataclass(frozen=True)
class Rung:
    """What the handle alone moved, by all ranks at the same time."""

    claimed_bytes: int
    seconds: float
    counted: Counted | None
    moment: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.claimed_bytes / self.seconds


@dataclass(frozen=True)
class Step:
    """One step."""

    seconds: float
    loss: float
    moved: Mapping[Direction, Moved]

    @property
    def compute(self) -> float:
        """Seconds in which no rank waited for storage: passes, communication, Adam, copies."""
        return max(0.0, self.seconds - sum(each.waited for each in self.moved.values()))

    @property
    def judgements(self) -> list[Judgement]:
        """By the drives' counters."""
        return [each.counted.judgement for each in self.moved.values() if each.counted is not None]


@dataclass
class Row:
    """The steps of one place under one ``aio`` block."""

    place: str
    block: str
    """Empty for DRAM."""
    medium: str
    stack: BlockStack | None = None
    """None for DRAM."""
    steps: dict[int, Step] = field(default_factory=dict)
    """By round."""
    rungs: dict[Direction, dict[int, Rung]] = field(default_factory=lambda: {"read": {}, "write": {}})
    repeated: Repeats = field(default_factory=Repeats)

    @property
    def key(self) -> str:
        """Its part of the figures' names."""
        return f"{self.place}.{self.block}" if self.block else self.place

    def seconds(self) -> dict[int, float]:
        """By round."""
        return {number: step.seconds for number, step in self.steps.items()}


@dataclass
class Place:
    """What is true of a place, whichever block moves its files."""

    name: str
    medium: str
    losses: list[float] = field(default_factory=list)
    """Of each step, warm-ups included."""
    looks: int = 0
    """How often the swap files were compared with what DeepSpeed must have written."""
    file_bytes: int = 0
    """Of the swap files of all ranks."""
    wrong_files: str = ""
    """The first difference."""


def moved_in(answers: Sequence[Mapping[str, Any]], direction: Direction) -> Moved:
    """From the ranks' answers, whose clocks are the same."""
    parts = [answer[direction] for answer in answers]
    flights = union([flight for part in parts for flight in part["flights"]])
    return Moved(
        claimed_bytes=sum(int(part["bytes"]) for part in parts),
        waited=sum(float(part["waited"]) for part in parts) / len(parts),
        in_flight=sum(end - begin for begin, end in flights),
    )
