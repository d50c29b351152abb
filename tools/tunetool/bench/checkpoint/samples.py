"""The samples of one medium, by engine and round. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tunetool.bench.checkpoint.engines import ENGINES, Entry
from tunetool.bench.checkpoint.fio_best import FioSample
from tunetool.measure import Direction
from tunetool.measure.evidence import Judgement
from tunetool.measure.fio import Outcome
from tunetool.measure.rounds import Transfer
from tunetool.measure.sampling import Repeats
from tunetool.node.machine.block_stack import BlockStack


@dataclass(frozen=True)
class Moved(Transfer):
    """One direction of one sample."""

    cpu_seconds: float


@dataclass(frozen=True)
class Sample:
    """One save of an engine, and its restore."""

    stall: float
    """Stall in seconds."""
    write: Moved
    """Seconds until everything was durable."""
    peak_bytes: int | None
    """Peak host memory beyond the memory before, of all ranks together. None: unknown."""
    read: Moved | None = None
    different: str | None = None
    """The first difference of what was restored from what was saved."""

    @property
    def judgements(self) -> list[Judgement]:
        """Evidence of both directions."""
        return [*self.write.judgements, *(self.read.judgements if self.read else [])]


@dataclass
class Row:
    """The samples of one engine."""

    name: str
    remark: str = ""
    left_out: str | None = None
    """Why the engine cannot run here; None if it can."""
    failed: str | None = None
    """The error that ended its measurement; None if there was none."""
    samples: dict[int, Sample] = field(default_factory=dict)
    """Samples by round."""
    first: Sample | None = None
    """First save of an asynchronous engine; its state is overwritten as soon as ``save`` returns."""
    lost: list[float] = field(default_factory=list)
    """Seconds that a training loop lost per save, one value for each loop."""
    held: list[float] = field(default_factory=list)
    """Stalls of that loop's saves, in seconds."""
    every: int = 0
    """Steps between two saves of that loop."""

    @property
    def engine(self) -> Entry:
        """What is known of the engine."""
        return ENGINES[self.name]

    @property
    def different(self) -> str | None:
        """The first restore that was not what was saved."""
        every = [*([self.first] if self.first else []), *self.samples.values()]
        return next((sample.different for sample in every if sample.different), None)

    def durable(self) -> dict[int, float]:
        """Seconds by round."""
        return {number: sample.write.seconds for number, sample in self.samples.items()}

    def restores(self) -> dict[int, float]:
        """Seconds by round."""
        return {number: sample.read.seconds for number, sample in self.samples.items() if sample.read}


@dataclass
class FioRows:
    """fio's samples in the same rounds."""

    version: str
    direct: bool
    searched: Mapping[Direction, Mapping[int, float]] = field(default_factory=dict)
    files: dict[Direction, int] = field(default_factory=dict)
    samples: dict[Direction, dict[int, FioSample]] = field(default_factory=lambda: {"write": {}, "read": {}})
    ceilings: Mapping[Direction, Sequence[Outcome]] = field(default_factory=dict)
    """fio without storage."""
    failed: str | None = None


@dataclass
class Matrix:
    """The samples of all engines on one medium."""

    stack: BlockStack
    memory: bool
    state_bytes: int
    rows: dict[str, Row] = field(default_factory=dict)
    fio: FioRows | None = None
    repeated: Repeats = field(default_factory=Repeats)
    """Number of samples that were repeated because something else used the drives."""
    baseline: list[float] = field(default_factory=list)
    """Seconds of training loops without a save."""
    errors: list[str] = field(default_factory=list)

    @property
    def measured(self) -> list[Row]:
        """Rows with figures, the fastest save first."""
        rows = [row for row in self.rows.values() if row.samples]
        return sorted(rows, key=lambda row: sorted(row.durable().values())[len(row.samples) // 2])
