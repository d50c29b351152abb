"""Sequential read and write of a directory with fio: the plan and what its samples are. Pure but for the free space."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tunetool.errors import UsageProblem
from tunetool.measure import Direction, tester
from tunetool.measure.evidence import Counted
from tunetool.measure.fio import Outcome
from tunetool.measure.sampling import Repeats
from tunetool.measure.statistics import LOOKS, estimate, next_look
from tunetool.node.units import format_size

MIB = 2**20
PROBE_BYTES = 64 * MIB
"""Each job's part of the short write that finds out how fast the target roughly is."""
LARGEST_FILE = 8 * 2**30
FREE_SHARE = 0.10
"""Of the free space: a scratch volume in use must not fill up because it is being measured."""
FEWEST, MOST = LOOKS[0][0], LOOKS[-1][0]
"""Samples of one direction: at least, and at most, while its interval contains the expected figure."""
WARM_UP_SHARE = 0.5
"""Of a sample's duration. It is a process of its own, so that nothing of it enters a sample."""
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
    ceiling: float | None
    limits: Mapping[Direction, float] = field(default_factory=dict)
    """Bytes per second that a direction is judged against, tolerance taken off."""
    volumes: Sequence[str] = ()
    """Names of several volumes that are measured at once; empty: there is the one."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Of each of them, the part of a limit that it is judged against; empty: none is judged by itself."""

    @property
    def jobs_each(self) -> int:
        """Of a volume."""
        return self.jobs // max(1, len(self.volumes))

    @property
    def space_bytes(self) -> int:
        """The most that the run's files take up."""
        return self.jobs * self.largest_file_bytes

    @property
    def seconds(self) -> float:
        """About how long it takes when the first look decides: samples, warm-up, laying out the files."""
        return self._seconds_of(FEWEST)

    @property
    def longest_seconds(self) -> float:
        """About how long it takes when both directions need every sample that they may have."""
        return self._seconds_of(MOST)

    def _seconds_of(self, samples: int) -> float:
        warm_up = WARM_UP_SHARE * self.duration + _START_SECONDS
        limits = 2 * tester.seconds(self.duration)
        return 2 * samples * (self.duration + _START_SECONDS) + warm_up + limits + self.duration + 3

    @property
    def written_bytes(self) -> float | None:
        """The most that can be written in that time, from the links' ceiling; None when that is unknown."""
        if self.ceiling is None:
            return None
        return self.ceiling * MOST * self.duration + self.space_bytes

    def announcement(self) -> list[str]:
        """Lines that describe the run before it starts."""
        amount = (
            f"at most {format_size(self.written_bytes)} in all, by the drives' links"
            if self.written_bytes is not None
            else "as much as the storage takes in that time"
        )
        at_once = f", `{'`, `'.join(self.volumes)}` at once" if self.volumes else ""
        return [
            f"writes to `{self.target}` ({self.medium}{at_once}): files of at most {format_size(self.space_bytes)}, "
            "removed afterwards",
            f"{FEWEST} writes and {FEWEST} reads of {self.duration:g} s by {self.jobs} jobs, about "
            f"{self.seconds:.0f} s; up to {MOST} of each, {self.longest_seconds:.0f} s, where they lie on both sides "
            f"of what is expected; {amount}",
        ]


@dataclass(frozen=True)
class Sample:
    """One fio process, with the drives' counts."""

    outcome: Outcome
    counted: Counted | None
    """None on a target without a block device."""
    moment: float
    """Middle of the sample, in seconds of a clock that never jumps."""
    volumes: Mapping[str, Sample] = field(default_factory=dict)
    """What belongs to each of several volumes, by name."""

    @property
    def claimed_bytes(self) -> int:
        """By fio."""
        return self.outcome.claimed_bytes


@dataclass
class Results:
    """Filled while measuring, so that what was measured before a failure is kept."""

    samples: dict[Direction, list[Sample]] = field(default_factory=dict)
    repeated: dict[Direction, Repeats] = field(default_factory=lambda: defaultdict(Repeats))
    ceilings: dict[Direction, list[Outcome]] = field(default_factory=dict)
    """Samples of fio without storage; none where that failed."""
    file_bytes: int = 0
    direct: bool = True
    incomplete: list[str] = field(default_factory=list)
    """Files of the run that hold less than was written to them."""

    def of_volume(self, name: str) -> Results:
        """What belongs to one of several volumes."""
        return replace(
            self,
            samples={way: [sample.volumes[name] for sample in kept] for way, kept in self.samples.items()},
            ceilings={},
        )


def plan(
    target: Path,
    medium: str,
    free_bytes: int,
    cpu_count: int,
    duration: float,
    ceiling: float | None,
    limits: Mapping[Direction, float] | None = None,
    volumes: Sequence[str] = (),
    parts: Mapping[str, float] | None = None,
) -> Plan:
    """Decide on jobs and sizes. Raises ``UsageProblem`` when there is too little space.

    ``volumes``: several, each with at least ``free_bytes``. ``parts``: see ``Plan``.
    """
    jobs = max(4, min(16, cpu_count))
    if volumes:
        jobs = -(-jobs // len(volumes)) * len(volumes)
    usable = int(free_bytes * max(1, len(volumes)) * FREE_SHARE)
    needed = jobs * PROBE_BYTES
    if usable < needed:
        raise UsageProblem(
            f"`{target}` has too little space: {format_size(free_bytes)} free",
            f"{format_size(needed / FREE_SHARE)} are needed: {format_size(needed)} of files, "
            f"and at most {FREE_SHARE:.0%} of the free space is used",
        )
    largest = min(LARGEST_FILE, usable // jobs // MIB * MIB)
    return Plan(str(target), medium, jobs, largest, duration, ceiling, limits or {}, volumes, parts or {})


def file_bytes(shape: Plan, bandwidth: float) -> int:
    """Size of each job's file so that writing all of them takes about one sample's duration."""
    wanted = int(bandwidth * shape.duration / shape.jobs) // MIB * MIB
    return max(PROBE_BYTES, min(shape.largest_file_bytes, wanted))


def free_bytes(target: Path) -> int:
    """Space that this user may still fill."""
    status = os.statvfs(target)
    return status.f_bavail * status.f_frsize


def takes_direct_io(directory: Path) -> bool:
    """Whether files there can be opened past the page cache."""
    probe = directory / "direct"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


def more_where_open(
    name: str,
    kept: Sequence[Sample],
    limit: float | None,
    say: Callable[[str], None],
    value: Callable[[Outcome], float] = lambda outcome: outcome.bandwidth,
) -> int | None:
    """How many samples it takes to look again; None when the figure is decided, or no look is left."""
    if limit is None:
        return None
    interval = estimate([value(sample.outcome) for sample in kept])
    if not interval.low < limit <= interval.high:
        return None
    more = next_look(len(kept))
    if more is not None:
        say(f"{name}: {len(kept)} samples lie on both sides of what is expected: {more - len(kept)} more")
    return more
