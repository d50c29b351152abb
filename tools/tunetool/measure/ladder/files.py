"""The file system's rungs: io_uring beside libaio, writes past the drives' caches, random requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunetool.measure import Direction, tester
from tunetool.measure.figure import spread_of
from tunetool.measure.fio import Outcome, no_io_uring
from tunetool.measure.ladder import calls
from tunetool.measure.ladder.budget import SAMPLES, SUSTAINED_BYTES_A_DRIVE, SUSTAINED_SAMPLES
from tunetool.measure.ladder.rung import Context, Label, Result, Rung, Skip, figure
from tunetool.measure.ladder.sampler import Call, Part, of_one_part
from tunetool.measure.metrics import MIB, Metric
from tunetool.measure.sequential import FEWEST, Plan
from tunetool.record import Measurement, Scalar

URING = "sequential.{direction}.{io_engine}"
SUSTAINED = "sustained.write"
_START = 1.0
_DIRECTIONS: tuple[Direction, ...] = ("write", "read")


@dataclass(frozen=True)
class Uring(Rung):
    """The sequential rungs of libaio, by io_uring."""

    name: str = "io_uring"

    def covers(self) -> Sequence[str]:
        """Both directions."""
        return [URING.format(direction=direction, io_engine="io_uring") for direction in reversed(_DIRECTIONS)]

    def seconds(self, shape: Plan, drives: int) -> float:
        """About how long it takes."""
        return 2 * SAMPLES * (shape.duration + _START)

    def run(self, context: Context) -> Result:
        """A figure for each direction."""
        obstacle = no_io_uring()
        if obstacle:
            raise Skip(obstacle)
        result = Result()
        for direction in _DIRECTIONS:
            result.add(self._direction(context, direction))
        return result

    def _direction(self, context: Context, direction: Direction) -> Result:
        jobs, seconds = context.shape.jobs, context.shape.duration
        argv = calls.sequential(
            context.sampler.fio, direction, "io_uring", jobs, context.sequential.file_bytes, seconds
        )
        part = Part("", context.stack)
        kept, repeats = context.sampler.rounds(of_one_part(argv, direction, seconds, part), f"{direction}-io_uring")
        uring = {"io_engine": "io_uring"}
        label = Label(URING, "filesystem", context.engine, direction, context.stack.medium, labels=uring)
        return figure(label, context.stack, kept[""], _parameters(context, "io_uring", MIB, 32, repeats))


@dataclass(frozen=True)
class Sustained(Rung):
    """A write so long that no cache of the drives hides what they can really take."""

    name: str = "sustained write"

    def covers(self) -> Sequence[str]:
        """Its one figure."""
        return [SUSTAINED]

    def seconds(self, shape: Plan, drives: int) -> float:
        """About how long it takes; less where the bytes are spent earlier."""
        return SUSTAINED_SAMPLES * shape.duration + _START

    def run(self, context: Context) -> Result:
        """One process; its samples are the intervals of fio's own log."""
        jobs, shape = context.shape.jobs, context.shape
        rate = context.written
        seconds = SUSTAINED_SAMPLES * shape.duration
        budget = SUSTAINED_BYTES_A_DRIVE * max(1, len(context.stack.leaves))
        if rate:
            seconds = max(4 * shape.duration, min(seconds, budget / rate))
        interval = seconds / SUSTAINED_SAMPLES
        argv = calls.sustained(context.sampler.fio, jobs, context.sequential.file_bytes, seconds, interval)
        samples = context.sampler.sample(Call("sustained-write", argv, "write", seconds, [Part("", context.stack)]))
        logs = sorted(context.directory.glob(f"{calls.BANDWIDTH_LOG}_bw.*.log"))
        texts = [log.read_text() for log in logs]
        context.sampler.raw["sustained-write-bandwidth.log"] = "".join(texts)
        label = Label("sustained.{direction}", "filesystem", context.engine, "write", context.stack.medium)
        parameters = {**_parameters(context, "libaio", MIB, 32, 0), "sample_seconds": interval}
        result = figure(label, context.stack, [samples[""]], {**parameters, "seconds": round(seconds, 3)})
        values = calls.intervals(texts)
        if len(values) >= FEWEST:
            result.measurements = [_over_time(result.measurements[0], values, interval)]
        return result


def _over_time(whole: Measurement, values: Sequence[float], interval: float) -> Measurement:
    """The figure of one long process with the samples of its intervals."""
    return whole.model_copy(update=spread_of(values, [(number + 0.5) * interval for number in range(len(values))]))


@dataclass(frozen=True)
class Random(Rung):
    """Random requests of one size."""

    metric: Metric

    @property
    def name(self) -> str:
        """For people."""
        return f"random {self.metric.direction}s, {self.metric.block}"

    def covers(self) -> Sequence[str]:
        """Its one figure."""
        return [self.metric.name]

    def seconds(self, shape: Plan, drives: int) -> float:
        """About how long it takes where nothing is expected of it."""
        return SAMPLES * (shape.duration + _START) + tester.seconds(shape.duration)

    def run(self, context: Context) -> Result:
        """A rate, with the latencies of its requests."""
        metric, jobs, seconds = self.metric, context.shape.jobs, context.shape.duration
        direction, block = metric.direction, metric.block
        engine = "libaio" if no_io_uring() else "io_uring"
        argv = calls.random_io(context.sampler.fio, metric, engine, jobs, context.sequential.file_bytes, seconds)
        part = Part("", context.stack)
        title = f"random-{block}" if direction == "read" else f"random-{direction}-{block}"
        ceiling = context.sampler.without_storage(title, argv, direction, seconds)
        kept, repeats = context.sampler.rounds(
            of_one_part(argv, direction, seconds, part), title, context.limits.get(metric.name), _rate
        )
        of_block = {"block": block}
        label = Label(
            metric.form, "filesystem", context.engine, direction, context.stack.medium, rate=True, labels=of_block
        )
        parameters = _parameters(context, engine, metric.block_bytes, metric.queue_depth, repeats)
        outcomes = [sample.outcome for sample in kept[""]]
        return figure(label, context.stack, kept[""], {**parameters, **tester.limits(outcomes, ceiling, jobs, _rate)})


def _rate(outcome: Outcome) -> float:
    return outcome.rate


def _parameters(context: Context, engine: str, block: int, depth: int, repeats: int) -> dict[str, Scalar]:
    return {
        "block_bytes": block,
        "queue_depth": depth,
        "jobs": context.shape.jobs,
        "io_engine": engine,
        "direct": True,
        "file_bytes": context.sequential.file_bytes,
        "sample_seconds": context.shape.duration,
        "repeated_samples": repeats,
    }
