"""Sequential read and write of a directory with fio: the plan (pure), then its execution."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure.evidence import REPEATS, Counted, count
from tunetool.measure.fio import Direction, Fio, FioFailed, Job, Outcome, run
from tunetool.measure.progress import Progress
from tunetool.node.blockstack import BlockStack, CountersChanged, difference, snapshot
from tunetool.node.units import format_bandwidth, format_size

MIB = 2**20
PROBE_BYTES = 64 * MIB
"""Each job's part of the short write that finds out how fast the target roughly is."""
LARGEST_FILE = 8 * 2**30
FREE_SHARE = 0.10
"""Of the free space: a scratch volume in use must not fill up because it is being measured."""
SAMPLES = 3
_START_SECONDS = 0.5
"""What a fio process costs on top of its samples."""


@dataclass(frozen=True)
class Plan:
    """What will be written and read, where, for how long."""

    target: str
    medium: str
    jobs: int
    largest_file_bytes: int
    duration: float
    samples: int
    ceiling: float | None

    @property
    def space_bytes(self) -> int:
        """The most that the run's files take up."""
        return self.jobs * self.largest_file_bytes

    @property
    def seconds(self) -> float:
        """About how long it takes: the samples of both directions, laying out the files, starting fio."""
        runs = 2 * self.samples
        return runs * (self.duration + _START_SECONDS) + self.duration + 3

    @property
    def written_bytes(self) -> float | None:
        """The most that can be written in that time, from the links' ceiling; None when that is unknown."""
        if self.ceiling is None:
            return None
        return self.ceiling * self.samples * self.duration + self.space_bytes

    def announcement(self) -> list[str]:
        """What a person must know before it starts."""
        amount = (
            f"at most {format_size(self.written_bytes)} in all, by the drives' links"
            if self.written_bytes is not None
            else "as much in all as it takes in that time"
        )
        return [
            f"writes to `{self.target}` ({self.medium}): files of at most {format_size(self.space_bytes)}, "
            "removed afterwards",
            f"{self.samples} writes and {self.samples} reads of {self.duration:g} s by {self.jobs} jobs, "
            f"about {self.seconds:.0f} s; {amount}",
        ]


@dataclass(frozen=True)
class Sample:
    """One fio process and what the drives say about it."""

    outcome: Outcome
    counted: Counted | None
    """None on a target without a block device."""


@dataclass
class Results:
    """Filled while measuring, so that what was measured before a failure is kept."""

    samples: dict[Direction, list[Sample]] = field(default_factory=dict)
    repeated: dict[Direction, int] = field(default_factory=dict)
    raw: dict[str, str] = field(default_factory=dict)
    file_bytes: int = 0
    direct: bool = True


def plan(target: Path, medium: str, free_bytes: int, cpu_count: int, duration: float, ceiling: float | None) -> Plan:
    """Decide on jobs and sizes. Raises ``UsageProblem`` when there is too little space."""
    jobs = max(4, min(16, cpu_count))
    usable = int(free_bytes * FREE_SHARE)
    needed = jobs * PROBE_BYTES
    if usable < needed:
        raise UsageProblem(
            f"`{target}` has too little space: {format_size(free_bytes)} free",
            f"{format_size(needed / FREE_SHARE)} are needed: {format_size(needed)} of files, "
            f"and at most {FREE_SHARE:.0%} of the free space is used",
        )
    largest = min(LARGEST_FILE, usable // jobs // MIB * MIB)
    return Plan(str(target), medium, jobs, largest, duration, SAMPLES, ceiling)


def file_bytes(shape: Plan, bandwidth: float) -> int:
    """Size of each job's file so that writing all of them takes about one sample's duration."""
    wanted = int(bandwidth * shape.duration / shape.jobs) // MIB * MIB
    return max(PROBE_BYTES, min(shape.largest_file_bytes, wanted))


def free_bytes(target: Path) -> int:
    """Space that this user may still fill."""
    status = os.statvfs(target)
    return status.f_bavail * status.f_frsize


@dataclass
class Sequential:
    """One execution of a plan inside the run's directory."""

    shape: Plan
    stack: BlockStack
    fio: Fio
    directory: Path
    environment: Mapping[str, str]
    progress: Progress
    results: Results

    def execute(self) -> None:
        """Probe, lay out, then the samples. Raises ``CannotJudge`` (``FioFailed`` among it)."""
        self.results.direct = _takes_direct_io(self.directory)
        probe = self._sample("probe", self._job("write", PROBE_BYTES, None), self.shape.duration, 300)
        speed = probe.outcome.bandwidth
        size = self.results.file_bytes = file_bytes(self.shape, speed)
        total = size * self.shape.jobs
        written = speed * self.shape.samples * self.shape.duration + total
        self.progress.say(
            f"about {format_bandwidth(speed)}: files of {format_size(total)}, {format_size(written)} written in all"
        )
        seconds = total / speed
        self._sample("layout", self._job("write", size, None), seconds, 60 + 10 * seconds)
        self._direction("write", size)
        self._direction("read", size)

    def _direction(self, direction: Direction, size: int) -> None:
        job = self._job(direction, size, self.shape.duration)
        kept = self.results.samples.setdefault(direction, [])
        repeats = 0
        while len(kept) < self.shape.samples:
            name = f"{direction}-{len(kept) + 1}" + (f"-repeat-{repeats}" if repeats else "")
            sample = self._sample(name, job, self.shape.duration, self.shape.duration + 60)
            # Only the counters decide what is taken again, never the speed.
            foreign = sample.counted is not None and sample.counted.judgement == "other-io"
            if foreign and repeats < REPEATS:
                repeats += 1
                self.results.repeated[direction] = repeats
                self.progress.say(f"{name}: something else used the drives meanwhile, taken again")
                continue
            kept.append(sample)

    def _job(self, direction: Direction, size: int, seconds: float | None) -> Job:
        return Job(direction, self.shape.jobs, size, seconds, direct=self.results.direct)

    def _sample(self, name: str, job: Job, seconds: float, timeout: float) -> Sample:
        with self.progress.step(f"{self.shape.target}: {name}", seconds) as tick:
            try:
                before = snapshot(self.stack)
                outcome = self._fio(name, job, timeout, tick)
                devices = difference(snapshot(self.stack), before)
            except CountersChanged as error:
                raise CannotJudge(f"the drives changed during `{name}`: {error}", "see `dmesg | tail`") from None
        if not self.stack.counts:
            return Sample(outcome, None)
        return Sample(outcome, count(self.stack, job.direction, outcome.claimed_bytes, devices))

    def _fio(self, name: str, job: Job, timeout: float, tick: Callable[[], None]) -> Outcome:
        try:
            outcome = run(self.fio, job, self.directory, self.environment, timeout, tick)
        except FioFailed as error:
            self.results.raw[f"fio-{name}.txt"] = error.raw
            raise
        self.results.raw[f"fio-{name}.json"] = outcome.raw
        return outcome


def _takes_direct_io(directory: Path) -> bool:
    probe = directory / "direct"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True
