"""fio's sequential writes and reads: the rung that all others are compared with, and sized by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tunetool.measure import Direction, tester
from tunetool.measure.evidence import incomplete
from tunetool.measure.fio import DATA_FILE, FioFailed, Job, Outcome, arguments, run
from tunetool.measure.ladder.rung import Context, Result, Rung
from tunetool.measure.sampling import Counting, collect, judgement_of_fio
from tunetool.measure.sequential import (
    FEWEST,
    PROBE_BYTES,
    WARM_UP_SHARE,
    Plan,
    Sample,
    file_bytes,
    more_where_open,
    takes_direct_io,
)
from tunetool.node.units import format_bandwidth, format_size


@dataclass(frozen=True)
class Sequential(Rung):
    """Its samples stand in ``Context.sequential``, also where it fails half-way."""

    indispensable: ClassVar[bool] = True
    needs_direct_io: ClassVar[bool] = False
    name: str = "fio"

    def announcement(self, shape: Plan) -> Sequence[str]:
        """What it writes, where, for how long."""
        return shape.announcement()

    def seconds(self, shape: Plan, drives: int) -> float:
        """About how long it takes."""
        return shape.seconds

    def run(self, context: Context) -> Result:
        """Raises ``CannotJudge`` (``FioFailed`` among it)."""
        _Execution(context).execute()
        return Result()


class _Execution:
    def __init__(self, context: Context) -> None:
        self.context, self.shape, self.results = context, context.shape, context.sequential
        self.sampler, self.progress = context.sampler, context.sampler.progress

    def execute(self) -> None:
        """Probe, lay out, then the samples."""
        self.results.direct = all(map(takes_direct_io, self.context.directories))
        probe = self._sample("probe", self._job("write", PROBE_BYTES, None), self.shape.duration, 300)
        speed = probe.outcome.bandwidth
        size = self.results.file_bytes = file_bytes(self.shape, speed)
        total = size * self.shape.jobs
        written = speed * FEWEST * self.shape.duration + total
        self.progress.say(
            f"about {format_bandwidth(speed)}: files of {format_size(total)}, {format_size(written)} or more written"
        )
        self._tester("write", size)
        self._tester("read", size)
        seconds = total / speed
        self._sample("layout", self._job("write", size, None), seconds, 60 + 10 * seconds)
        self._look_at_files(size)
        # The layout has warmed the writes up.
        self._direction("write", size)
        warm_up = WARM_UP_SHARE * self.shape.duration
        self._sample("warm-up", self._job("read", size, warm_up), warm_up, warm_up + 60)
        self._direction("read", size)
        self._look_at_files(size)

    def _tester(self, direction: Direction, size: int) -> None:
        """What fio reaches by itself, by which a slow fio is told from slow drives."""
        seconds = self.shape.duration
        argv = arguments(self.sampler.fio, self._job(direction, size, seconds))
        load = tester.Load(self.sampler.fio, argv, direction, seconds, self.context.directory, self.context.environment)
        self.results.ceilings[direction] = tester.measure_ceiling(load, direction, self.progress, self.sampler.raw)

    def _look_at_files(self, size: int) -> None:
        """A sparse or short file is read without a drive; what is not stored was not written either."""
        names = [DATA_FILE.format(number=number) for number in range(self.shape.jobs_each)]
        for directory in self.context.directories:
            self.results.incomplete += incomplete(directory, names, size)

    def _direction(self, direction: Direction, size: int) -> None:
        job = self._job(direction, size, self.shape.duration)
        collect(
            self.results.samples.setdefault(direction, []),
            direction,
            FEWEST,
            lambda name: self._sample(name, job, self.shape.duration, self.shape.duration + 60),
            judgement_of_fio,
            self.results.repeated[direction],
            self.progress.say,
            lambda kept: self._more(direction, kept),
        )

    def _more(self, direction: Direction, kept: Sequence[Sample]) -> int | None:
        """How many samples it takes to judge all volumes together, and each of them; None where these decide."""
        limit, say = self.shape.limits.get(direction), self.progress.say
        more = more_where_open(direction, kept, limit, say)
        for name, part in self.shape.parts.items():
            if more is None and limit is not None:
                own = [sample.volumes[name] for sample in kept]
                more = more_where_open(f"{direction}, {name}", own, part * limit, say)
        return more

    def _job(self, direction: Direction, size: int, seconds: float | None) -> Job:
        places = list(self.context.volumes.items())
        return Job(direction, self.shape.jobs_each, size, seconds, direct=self.results.direct, places=places)

    def _sample(self, name: str, job: Job, seconds: float, timeout: float) -> Sample:
        step = self.progress.step(f"{self.shape.target}: {name}", seconds)
        direct = self.context.directory if job.direct else None
        with step as tick, Counting(self.context.stack, f"`{name}`", direct=direct) as counting:
            outcome = self._fio(name, job, timeout, counting.ticking(tick))
        return Sample(
            outcome,
            counting.count(job.direction, outcome.claimed_bytes),
            counting.moment,
            {
                name: Sample(share, counting.count(job.direction, share.claimed_bytes, part), counting.moment)
                for name, part in zip(self.context.volumes, self.context.stack.parts, strict=False)
                for share in [outcome.places[name]]
            },
        )

    def _fio(self, name: str, job: Job, timeout: float, tick: Callable[[], None]) -> Outcome:
        try:
            outcome = run(self.sampler.fio, job, self.context.directory, self.context.environment, timeout, tick)
        except FioFailed as error:
            self.sampler.raw[f"fio-{name}.txt"] = error.raw
            raise
        self.sampler.raw[f"fio-{name}.json"] = outcome.raw
        return outcome
