"""The limits of fio itself: what it reaches where no storage answers, and how much of the cores it keeps busy.

A figure close to either is the program's, not the drives': ``verdict.tester_limit`` judges that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

from tunetool.measure import Direction
from tunetool.measure.fio import Fio, FioFailed, Outcome, execute, shares
from tunetool.measure.progress import Progress
from tunetool.record import Scalar
from tunetool.verdict import TESTER_CEILING, TESTER_CPU_SHARE

NULL_ENGINE = "null"
"""fio's engine that completes each request at once, without opening a file."""
SAMPLES = 3
SAMPLE_SHARE, LONGEST_SAMPLE = 0.125, 0.5
"""Seconds of one sample, as a share of a figure's, and at most: it must add little to a verification."""
START_SECONDS = 0.5


def seconds(duration: float) -> float:
    """About how long the ceiling of one figure takes, whose samples take ``duration``."""
    return SAMPLES * (_sample_seconds(duration) + START_SECONDS)


def without_storage(argv: Sequence[str], duration: float) -> list[str]:
    """The command line ``argv``, which runs for a fixed time, with the same requests to no storage."""
    # fio 3.33 moves nothing there where a job begins at an offset.
    left_out = ("--ioengine=", "--runtime=", "--time_based=", "--offset=")
    kept = [word for word in argv if not word.startswith(left_out)]
    runtime = f"--runtime={round(_sample_seconds(duration) * 1000)}ms"
    # In front of what is a single job's, so that it holds for all of them.
    return [kept[0], f"--ioengine={NULL_ENGINE}", "--time_based=1", runtime, *kept[1:]]


@dataclass(frozen=True)
class Load:
    """What fio does for one figure: ``argv`` in ``directory``, whose samples take ``duration`` seconds."""

    fio: Fio
    argv: Sequence[str]
    direction: Direction
    duration: float
    directory: Path
    environment: Mapping[str, str]

    def sample_ceiling(self, tick: Callable[[], None]) -> list[Outcome]:
        """Samples of the same requests without storage. Raises ``FioFailed``."""
        outcomes: list[Outcome] = []
        call = without_storage(self.argv, self.duration)
        for _ in range(SAMPLES):
            stdout, stderr = execute(self.fio, call, self.directory, self.environment, self.duration + 60, tick)
            outcomes += shares(self.fio, self.direction, stdout, stderr).values()
        return outcomes


def measure_ceiling(load: Load, name: str, progress: Progress, raw: MutableMapping[str, str]) -> list[Outcome]:
    """Samples of ``load`` without storage; no sample where this fio cannot do that, which ``progress`` says."""
    try:
        with progress.step(f"{name}: fio without storage", seconds(load.duration)) as tick:
            outcomes = load.sample_ceiling(tick)
    except FioFailed as error:
        raw[f"fio-{name}-without-storage.txt"] = error.raw
        progress.say(f"{name}: the tester's limit is not known: {error.message}")
        return []
    raw[f"fio-{name}-without-storage.json"] = outcomes[-1].raw
    return outcomes


class Spent(Protocol):
    """A sample that says how many cores' worth of time it took."""

    @property
    def cores(self) -> float:
        """Cores."""


def limits(
    samples: Sequence[Spent],
    ceiling: Sequence[Outcome],
    jobs: int,
    value: Callable[[Outcome], float] = lambda outcome: outcome.bandwidth,
) -> dict[str, Scalar]:
    """Parameters of the figure of ``samples`` by ``jobs`` threads, each worth a ``value``."""
    return {**cpu_share([each.cores for each in samples], jobs), **ceiling_of([value(each) for each in ceiling])}


def ceiling_of(values: Sequence[float]) -> dict[str, Scalar]:
    """Parameter of a figure whose program reached ``values`` without storage; none without any."""
    return {TESTER_CEILING: median(values)} if values else {}


def cpu_share(cores: Sequence[float], threads: int) -> dict[str, Scalar]:
    """Parameter of a figure whose samples spent so many cores' worth of time in so many threads; none without any."""
    return {TESTER_CPU_SHARE: round(median(cores) / cores_open_to(threads), 4)} if cores else {}


def cores_open_to(threads: int) -> int:
    """The most cores that so many threads can use here."""
    return max(1, min(threads, len(os.sched_getaffinity(0))))


def _sample_seconds(duration: float) -> float:
    return min(LONGEST_SAMPLE, duration * SAMPLE_SHARE)
