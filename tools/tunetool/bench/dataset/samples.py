"""The passes over the data by every engine, by state of the page cache and round. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from tunetool.bench.dataset.engines import Engine
from tunetool.measure.rounds import Transfer
from tunetool.measure.sampling import Repeats
from tunetool.node.machine.block_stack import BlockStack
from tunetool.record import Scalar

State = Literal["cold", "warm"]
TITLES: dict[State, str] = {"cold": "from the drives", "warm": "from the page cache"}


def title_of(state: State, medium: str) -> str:
    """Where the bytes came from, for people; ``medium``: that of the figures."""
    return TITLES[state] if state == "cold" or medium == "page cache" else f"from {medium}"


@dataclass(frozen=True)
class Pass(Transfer):
    """One pass over all samples, or as many as the time allowed. ``bytes``: of the samples that were handed out."""

    samples: int
    is_equal: bool | None
    """None where the engine hands no bytes out."""
    fetched: int | None
    """Bytes that the kernel fetched from drives for the engine's processes; None where it does not count."""
    ceiling: float
    """Samples per second of the same program where no storage answers."""
    cores: float
    """CPU seconds of its processes for each second."""
    major_faults: int = 0
    minor_faults: int = 0
    huge_bytes: int = 0
    """Of the mapped file, on huge pages at the end of the pass."""
    pool_bytes: int = 0
    """Mapped from the kernel's pool of huge pages (``vm.nr_hugepages``)."""
    ended_by_read_ahead: bool = False
    """Whether it ended because later samples would have come from what the kernel read ahead."""


@dataclass
class EngineRow:
    """One engine in one state: its passes by round, or why there are none."""

    engine: Engine
    left_out: str | None = None
    failed: str | None = None
    passes: dict[int, Pass] = field(default_factory=dict)
    facts: dict[str, Scalar] = field(default_factory=dict)
    """What its process says about itself: versions, device, the way of the bytes."""

    def typical(self, value: Callable[[Pass], float]) -> float:
        """The median over the passes."""
        return median(map(value, self.passes.values()))

    def seconds_of_a_sample(self) -> dict[int, float]:
        """By round, seconds for each sample."""
        return {number: each.seconds / each.samples for number, each in self.passes.items()}


@dataclass
class StateTable:
    """All engines in one state of the page cache."""

    state: State
    stack: BlockStack
    rows: dict[str, EngineRow] = field(default_factory=dict)
    libraries: dict[str, str] = field(default_factory=dict)
    """By name, why a library has no figures here."""
    repeated: Repeats = field(default_factory=Repeats)
    """Passes that were repeated because something else used the drives."""

    @property
    def medium(self) -> str:
        """Where the bytes lie that are read."""
        return "page cache" if self.state == "warm" and not self.stack.in_memory else self.stack.medium

    @property
    def title(self) -> str:
        """For people."""
        return title_of(self.state, self.medium)
