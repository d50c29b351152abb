"""A rung: one step of a measurement, from fio's sequential figures down to a bare drive and up to a checkpoint.

A command plans its rungs, runs them one after the other, and judges what they found. What one found is kept when a
later one fails. A rung of the ladder makes its figures by ``figure``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, median_high
from typing import ClassVar, Protocol

from tunetool.errors import CannotJudge
from tunetool.measure import Direction, evidence
from tunetool.measure.aio.ops import Probe, probe
from tunetool.measure.evidence import wrong_clock
from tunetool.measure.figure import Quantity, What, measured
from tunetool.measure.fio import DATA_FILE, Outcome
from tunetool.measure.ladder.sampler import Sampler
from tunetool.measure.ladder.source import RawData, raw_data, unmoved
from tunetool.measure.sequential import Plan, Results, Sample
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.machine.drives import Drive
from tunetool.record import CheckResult, Measurement, Scalar

_NO_DIRECT_IO = "the file system takes no direct I/O"
_MOVED = "the file system moved the files meanwhile: what was read may not have been theirs"


class Skip(Exception):
    """The rung cannot be run here; the message is the reason."""


@dataclass
class Result:
    """What one rung found, or all of them."""

    measurements: list[Measurement] = field(default_factory=list)
    unproven: dict[str, str] = field(default_factory=dict)
    """By measurement name, why its samples prove nothing."""
    checks: list[CheckResult] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """By measurement name, why its rung was not run."""
    errors: list[str] = field(default_factory=list)

    def add(self, other: Result) -> None:
        """Add what another rung found."""
        self.measurements += other.measurements
        self.unproven.update(other.unproven)
        self.checks += other.checks
        self.skipped.update(other.skipped)
        self.errors += other.errors


@dataclass
class Context:
    """The run, as its rungs see it: its files lie in ``directory``."""

    shape: Plan
    stack: BlockStack
    directory: Path
    sampler: Sampler
    environment: Mapping[str, str]
    drives: Sequence[Drive] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    """By measurement name, what its figure is judged against, tolerance taken off."""
    python: Path = Path(sys.executable)
    """The interpreter with the user's torch and deepspeed."""
    require_deepspeed: bool = False
    """Whether a handle of DeepSpeed's that fails is an error."""
    sequential: Results = field(default_factory=Results)
    """What fio's sequential rung measured: it is the first one, and the others size their work by it."""
    installed: Probe | None = None
    """What the user's Python has, once it was asked."""
    volumes: Mapping[str, Path] = field(default_factory=dict)
    """The directories of the run in several volumes, by name; empty: there is the one."""
    _raw: tuple[RawData | None, str] | None = None

    @property
    def directories(self) -> Sequence[Path]:
        """Every directory of the run."""
        return list(self.volumes.values()) or [self.directory]

    def of_volume(self, name: str) -> Context:
        """The run as it is for one of several volumes."""
        directory, stack = self.volumes[name], self.stack.parts[list(self.volumes).index(name)]
        sampler = replace(self.sampler, stack=stack, directory=directory)
        sequential = self.sequential.of_volume(name)
        return replace(self, stack=stack, directory=directory, sampler=sampler, sequential=sequential, volumes={})

    @property
    def engine(self) -> str:
        """The program that reads and writes, for records."""
        return f"fio {self.sampler.fio.version}"

    @property
    def written(self) -> float:
        """Bytes per second of the sequential write; 0 where that was not measured."""
        samples = self.sequential.samples.get("write", [])
        return median_high([each.outcome.bandwidth for each in samples]) if samples else 0.0

    @property
    def slowest(self) -> float:
        """Bytes per second of fio's slowest sequential sample; 0 where none was measured."""
        samples = [each for kept in self.sequential.samples.values() for each in kept]
        return min((each.outcome.bandwidth for each in samples), default=0.0)

    def probe(self) -> Probe:
        """Ask the user's Python, once. Raises ``Missing``."""
        if self.installed is None:
            self.installed = probe(self.python, self.environment)
        return self.installed

    def raw_data(self) -> RawData:
        """Where the run's files lie on the drives, proven by reading it both ways. Raises ``Skip``."""
        if self._raw is None:
            names = [DATA_FILE.format(number=number) for number in range(self.shape.jobs)]
            self._raw = raw_data(self.stack, [self.directory / name for name in names])
        data, obstacle = self._raw
        if data is None:
            raise Skip(obstacle)
        return data

    def files_moved(self) -> bool:
        """Whether the file system moved the files since a rung read them on the drives."""
        return self._raw is not None and self._raw[0] is not None and not unmoved(self._raw[0])


class Rung(Protocol):
    """One rung, or several that are measured together."""

    indispensable: ClassVar[bool] = False
    """Whether the run ends where it fails."""
    needs_direct_io: ClassVar[bool] = True
    """Without direct I/O the page cache would answer."""

    @property
    def name(self) -> str:
        """Title for people."""

    def announcement(self, shape: Plan) -> Sequence[str]:
        """Lines that describe it before it starts."""
        return ()

    def covers(self) -> Sequence[str]:
        """Names of the measurements that are missing where it is skipped."""
        return ()

    def seconds(self, shape: Plan, drives: int) -> float:
        """About how long it takes."""

    def has_a_say(self, context: Context) -> bool:
        """Whether it is an error of the run if it fails."""
        return True

    def run(self, context: Context) -> Result:
        """Measure. Raises ``Skip`` or ``CannotJudge``."""


def run(rungs: Sequence[Rung], context: Context, found: Result) -> None:
    """Run them in their order; ``found`` grows. Raises ``CannotJudge`` where an indispensable one fails."""
    for rung in rungs:
        if rung.needs_direct_io and not context.sequential.direct:
            found.skipped.update(dict.fromkeys(rung.covers(), _NO_DIRECT_IO))
            continue
        try:
            found.add(rung.run(context))
        except Skip as reason:
            context.sampler.progress.say(f"{rung.name}: skipped: {reason}")
            found.skipped.update(dict.fromkeys(rung.covers(), str(reason)))
        except CannotJudge as error:
            if rung.indispensable:
                raise
            if rung.has_a_say(context):
                found.errors.append(f"{rung.name}: {error.message}" + (f"; {error.hint}" if error.hint else ""))
            found.skipped.update(dict.fromkeys(rung.covers(), f"it failed: {error.message}"))
    if context.files_moved():
        on_drives = [m.name for m in found.measurements if m.layer in ("drive", "md")]
        found.unproven.update(dict.fromkeys(on_drives, _MOVED))


@dataclass(frozen=True)
class Label:
    """What a figure is."""

    form: str
    """Of its name."""
    layer: str
    engine: str
    direction: Direction
    medium: str
    rate: bool = False
    """Requests per second, not bytes."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Those beside the direction."""
    figure: str = ""
    """Empty: ``bandwidth``, or ``rate``."""


def figure(label: Label, stack: BlockStack, samples: Sequence[Sample], parameters: Mapping[str, Scalar]) -> Result:
    """One measurement of the samples, whose bytes the devices of ``stack`` counted."""
    value: Callable[[Outcome], float] = lambda outcome: outcome.rate if label.rate else outcome.bandwidth  # noqa: E731
    values = [value(sample.outcome) for sample in samples]
    cores = median(sample.outcome.cores for sample in samples)
    quantity: Quantity = "rate" if label.rate else "bandwidth"
    what = What(
        label.form,
        quantity,
        label.engine,
        label.medium,
        label.figure or quantity,
        {"direction": label.direction, **label.labels},
        label.layer,
        {"direction": label.direction, **parameters, "cores_used": round(cores, 3)},
    )
    measurement = measured(what, stack, samples, values, [sample.outcome.percentiles for sample in samples])
    reason = doubt(stack, label.direction, samples)
    return Result([measurement], {measurement.name: reason} if reason else {})


def doubt(stack: BlockStack, direction: Direction, samples: Sequence[Sample]) -> str | None:
    """Why the samples prove nothing; None where the counters agree, in bytes and in time."""
    reason = evidence.doubt(stack, direction, [sample.counted for sample in samples])
    if reason:
        return reason
    return wrong_clock((sample.counted, sample.outcome.seconds) for sample in samples)
