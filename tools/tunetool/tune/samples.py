"""The samples of a search with the drives' counts, and their measurements in the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tunetool.errors import CannotJudge
from tunetool.measure import Direction
from tunetool.measure.evidence import Claim, Counted, explain
from tunetool.measure.figure import What, measured
from tunetool.measure.sampling import Counting, Repeats, again, judgement
from tunetool.measure.tester import ceiling_of, cpu_share
from tunetool.node.machine.block_stack import BlockStack
from tunetool.record import Measurement, Scalar
from tunetool.tune.search import SettingFailed
from tunetool.tune.settings import DEFAULTS, AioSettings


@dataclass(frozen=True)
class Move(Claim):
    """The claim of a driver for one transfer."""

    cores: float | None = None
    """How many cores' worth of time the processes spent meanwhile; None where they do not say."""


@dataclass(frozen=True)
class Sample:
    """A transfer that the drives' counters confirm."""

    rate: float
    claimed_bytes: int
    counted: Counted | None
    moment: float
    cores: float | None = None


class Driver(Protocol):
    """The interface of a driver: moves bytes with given settings."""

    io_bytes: int
    """Bytes of one transfer of each process."""

    @property
    def engine(self) -> str:
        """The engine, with its version."""

    def move(self, settings: AioSettings, direction: Direction) -> Move:
        """Take one sample. Raises ``SettingFailed`` if the settings cannot be used."""

    def without_storage(self, settings: AioSettings, direction: Direction) -> list[float]:
        """Bytes per second in samples of the same requests, which no storage answers; none where that fails."""


@dataclass
class Samples:
    """Takes samples with a driver, and keeps the proven ones."""

    driver: Driver
    stack: BlockStack
    clock: Callable[[], float]
    say: Callable[[str], None] = lambda _: None
    """Called once when something else uses the drives, and once when it is known what, not for each sample: a search
    takes hundreds."""
    direct: Path | None = None
    """Where the files lie, which the driver opens for direct I/O."""
    kept: dict[AioSettings, dict[Direction, list[Sample]]] = field(default_factory=dict)
    thrown: int = 0
    """Samples during which something else used the drives."""
    ceilings: dict[tuple[AioSettings, Direction], list[float]] = field(default_factory=dict)
    """Bytes per second that the driver reaches without storage, where that was asked."""
    _announced: bool = False
    _named: bool = False

    def take(self, settings: AioSettings, direction: Direction) -> float | None:
        """Bytes per second; None if other I/O disturbed every try. Raises ``SettingFailed``, ``CannotJudge``."""
        repeats = Repeats()
        name = f"{direction} by {settings}"
        sample = again(name, lambda _: self._try(settings, direction), judgement, repeats, self._say)
        beside_others = sample.counted is not None and sample.counted.judgement == "other-io"
        self.thrown += repeats.taken + beside_others
        if beside_others:
            if sample.counted is not None and sample.counted.others and not self._named:
                self._named = True
                self.say(f"something else uses the drives: {sample.counted.others}")
            return None
        self.kept.setdefault(settings, {}).setdefault(direction, []).append(sample)
        return sample.rate

    def ask_without_storage(self, settings: AioSettings, direction: Direction) -> None:
        """Measure what the driver itself reaches, for the figure of ``settings`` and ``direction``."""
        self.ceilings[settings, direction] = self.driver.without_storage(settings, direction)

    def _say(self, line: str) -> None:
        if not self._announced:
            self._announced = True
            self.say(line)

    def _try(self, settings: AioSettings, direction: Direction) -> Sample:
        what = f"a {direction} by `{settings}`"
        with Counting(self.stack, what, self.clock, self.direct) as counting:
            claim = self.driver.move(settings, direction)
        counted = counting.count(direction, claim.claimed_bytes)
        if counted is not None and (counted.judgement == "missing" or counted.cached_bytes):
            reason = explain(self.stack, direction, counted, self.driver.engine)
            if counted.cached_bytes:
                raise CannotJudge(reason)
            if settings == DEFAULTS:
                raise CannotJudge(reason, "look for a full disk or I/O errors: `df`, `dmesg | tail`")
            raise SettingFailed(reason)
        return Sample(claim.bandwidth, claim.claimed_bytes, counted, counting.moment, claim.cores)


def figures(samples: Samples, conditions: Mapping[str, Scalar]) -> list[Measurement]:
    """One measurement for each setting and direction; ``conditions`` hold for all of them."""
    return [
        _figure(samples, settings, direction, taken, conditions)
        for settings, sides in sorted(samples.kept.items())
        for direction, taken in sorted(sides.items())
    ]


def block_of(settings: AioSettings) -> str:
    """The label ``block`` of a measurement: ``1048576x32x4``, and the flags that are set."""
    shape = f"{settings.block_size}x{settings.queue_depth}x{settings.intra_op_parallelism}"
    return "-".join([shape, *settings.flags])


def _figure(
    samples: Samples,
    settings: AioSettings,
    direction: Direction,
    taken: list[Sample],
    conditions: Mapping[str, Scalar],
) -> Measurement:
    threads = settings.intra_op_parallelism * int(conditions.get("processes") or 1)
    limits = {
        **cpu_share([sample.cores for sample in taken if sample.cores is not None], threads),
        **ceiling_of(samples.ceilings.get((settings, direction), [])),
    }
    what = What(
        "tune.{direction}.{block}",
        "bandwidth",
        samples.driver.engine,
        samples.stack.medium,
        "bandwidth",
        {"direction": direction, "block": block_of(settings)},
        parameters={"direction": direction, **settings.block(), **conditions, **limits},
    )
    return measured(what, samples.stack, taken, [sample.rate for sample in taken])
