"""One run of the fine-tune on one path, and its figures. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import inf, isfinite
from statistics import median, quantiles
from typing import Literal

from tunetool.bench.staging.published import Pair, Scenario
from tunetool.bench.staging.reading import Read
from tunetool.measure.rounds import ratio
from tunetool.training.workload import RankResult

Path = Literal["memory", "bulk"]
PATHS: tuple[Path, Path] = ("memory", "bulk")
"""Path A: staged to memory and read there. Path B: read from bulk storage."""
FEWEST_BATCHES = 10
"""Fewer batches have no 95th percentile to speak of."""


@dataclass(frozen=True)
class Staged:
    """The staging to the memory of every node; ``seconds``: the slowest node's."""

    seconds: float
    bytes: int
    """Bytes on each node."""

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.bytes / max(self.seconds, 1e-6)


@dataclass(frozen=True)
class Sample:
    """One run: all of its ranks, and the staging before it on path A."""

    ranks: Sequence[RankResult]
    images: int
    """Number of samples of the data set."""
    batch_size: int
    staged: Staged | None = None
    mapped: bool = False
    """Whether the model's files are mapped, so that no read call counts their bytes."""

    @property
    def steps(self) -> int:
        """Number of steps of each rank."""
        return min(len(rank.step_seconds) for rank in self.ranks)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch: complete batches for every rank, without the rest."""
        return max(1, self.images // (self.batch_size * len(self.ranks)))

    @property
    def extrapolated(self) -> bool:
        """Whether the run ended within its first epoch, so that an epoch's time is a multiple of what was measured."""
        return self.steps < self.steps_per_epoch

    @property
    def load(self) -> float:
        """Seconds until the slowest rank had the model."""
        return max(rank.seconds["model_load"] for rank in self.ranks)

    @property
    def data_per_batch(self) -> float:
        """Seconds to read and decode one batch, waited for or not: the mean on the slowest rank."""
        return max(_mean(rank.load_seconds or rank.data_seconds) for rank in self.ranks)

    @property
    def waited_per_batch(self) -> float:
        """Seconds for which a step waited for its batch: the mean on the slowest rank."""
        return max(_mean(rank.data_seconds) for rank in self.ranks)

    @property
    def batch_spread(self) -> float | None:
        """95th percentile of the seconds to read and decode one batch over their median, on the least steady rank.

        The first batch is left out: workers start during it. None if a rank has fewer than ``FEWEST_BATCHES`` others.
        """
        loads = [list(rank.load_seconds or rank.data_seconds)[1:] for rank in self.ranks]
        if min(map(len, loads)) < FEWEST_BATCHES or not all(median(each) for each in loads):
            return None
        return max(quantiles(each, n=20, method="inclusive")[-1] / median(each) for each in loads)

    @property
    def first_epoch(self) -> float:
        """Seconds of the slowest rank, from its first batch on, without the start-up of its first step."""
        count = min(self.steps, self.steps_per_epoch)
        return max(_spent(rank, 0, count) - _start_up(rank) for rank in self.ranks) * self.steps_per_epoch / count

    @property
    def first_step(self) -> float:
        """Seconds that the first step took longer than a later one, on the slowest rank: it loads kernels and makes
        buffers.

        Once for each run, more for the first on a machine, and none of it the storage's: an epoch that was extrapolated
        from a few steps would hold it many times.
        """
        return max(_start_up(rank) for rank in self.ranks)

    @property
    def later_epoch(self) -> float | None:
        """Seconds of the median later epoch of the slowest rank; None where none was complete."""
        whole = self.steps // self.steps_per_epoch
        if whole < 2:
            return None
        size = self.steps_per_epoch
        return max(
            median(_spent(rank, number * size, (number + 1) * size) for number in range(1, whole))
            for rank in self.ranks
        )

    @property
    def fine_tune(self) -> float:
        """Seconds of all steps and the waiting for their data, on the slowest rank."""
        return max(_spent(rank, 0, self.steps) for rank in self.ranks)

    @property
    def end_to_end(self) -> float:
        """Seconds from the start of the ranks to their end; staging included on path A."""
        return max(rank.seconds["end_to_end"] for rank in self.ranks) + (self.staged.seconds if self.staged else 0.0)

    @property
    def losses(self) -> list[float]:
        """Losses of rank 0, by step."""
        return list(min(self.ranks, key=lambda rank: rank.rank).losses)

    @property
    def excused(self) -> frozenset[int]:
        """Steps whose loss may be no number (``RankResult.excused_steps``)."""
        return self.ranks[0].excused_steps

    @property
    def notes(self) -> list[str]:
        """Deviations from the request, on any rank."""
        return list(dict.fromkeys(note for rank in self.ranks for note in rank.notes))

    def reads(self) -> list[Read]:
        """What every rank read. Where no call counts it (mapped files, kernels without /proc/self/io), all that it made
        tensors of."""
        reads = []
        for rank in self.ranks:
            model, data = rank.read_bytes.get("model", {}), rank.read_bytes.get("data", {})
            asked = max(model.get("logical", 0), model.get("storage", 0))
            reads.append(
                Read(
                    rank.rank,
                    rank.host,
                    rank.model_bytes if self.mapped or not asked else asked,
                    model.get("storage", 0),
                    max(data.get("logical", 0), data.get("storage", 0)),
                    data.get("storage", 0),
                )
            )
        return reads


FIGURES: Mapping[str, Callable[[Sample], float | None]] = {
    "stage": lambda sample: sample.staged.seconds if sample.staged else None,
    "model_load": lambda sample: sample.load,
    "data_per_batch": lambda sample: sample.data_per_batch,
    "data_wait_per_batch": lambda sample: sample.waited_per_batch,
    "first_epoch": lambda sample: sample.first_epoch,
    "later_epoch": lambda sample: sample.later_epoch,
    "fine_tune": lambda sample: sample.fine_tune,
    "first_step": lambda sample: sample.first_step,
    "end_to_end": lambda sample: sample.end_to_end,
}
"""Every duration, in seconds, by its name."""


@dataclass
class Row:
    """One scenario, round by round."""

    name: Scenario
    nodes: int
    ranks: int
    model_bytes: int
    data_bytes: int
    samples: dict[Path, dict[int, Sample]] = field(default_factory=lambda: {"memory": {}, "bulk": {}})
    failed: str | None = None
    left_out: str | None = None

    def seconds(self, path: Path, figure: str) -> dict[int, float]:
        """The values of a figure by round."""
        values = {number: FIGURES[figure](sample) for number, sample in self.samples[path].items()}
        return {number: value for number, value in values.items() if value is not None}

    def pair(self, figure: str) -> Pair | None:
        """The medians of both paths; None if one has none."""
        both = [list(self.seconds(path, figure).values()) for path in PATHS]
        return Pair(median(both[0]), median(both[1])) if all(both) else None

    def apart(self) -> bool:
        """Whether model load and first epoch differ the same way in every round that has both paths."""
        shared = self.samples["memory"].keys() & self.samples["bulk"].keys()
        longer = [
            self.samples["bulk"][number].load + self.samples["bulk"][number].first_epoch
            > self.samples["memory"][number].load + self.samples["memory"][number].first_epoch
            for number in shared
        ]
        return all(longer) or not any(longer)

    @property
    def decided(self) -> bool:
        """Whether the rounds decide on which path model and first epoch take less."""

        def seconds(path: Path) -> dict[int, float]:
            return {number: each.load + each.first_epoch for number, each in self.samples[path].items()}

        to_bulk = ratio("bulk", seconds("bulk"), seconds("memory"))
        return to_bulk is not None and to_bulk.decided

    @property
    def complete(self) -> bool:
        """Whether both paths were measured."""
        return bool(self.samples["memory"] and self.samples["bulk"])


@dataclass(frozen=True)
class Losses:
    """Whether both paths trained the same thing: relative differences of losses between them, step by step."""

    steps: int
    first: float
    """The largest of a first step."""
    largest: float
    """The largest of any step."""
    by_chance: Sequence[float] | None
    """Of each path, the largest between two of its rounds, which read the same bytes; None where a path has no two
    that can be compared."""


def compare_losses(row: Row) -> Losses | None:
    """Compare the losses of both paths, step by step, in every round that has both. None if no round has."""
    shared = sorted(row.samples["memory"].keys() & row.samples["bulk"].keys())
    if not shared:
        return None
    apart = [_apart(row.samples["memory"][number], row.samples["bulk"][number]) for number in shared]
    again = [_within([row.samples[path][number] for number in shared]) for path in PATHS]
    return Losses(
        steps=sum(map(len, apart)),
        first=max(each[0] for each in apart),
        largest=max(map(max, apart)),
        by_chance=[max(each) for each in again] if all(again) else None,
    )


def _within(rounds: Sequence[Sample]) -> list[float]:
    """Relative differences between the rounds of one path. Other steps, or a loss that is no number, show nothing of
    what chance does."""
    return [each for pair in combinations(rounds, 2) for each in _apart(*pair) if isfinite(each)]


def _apart(one: Sample, other: Sample) -> list[float]:
    """Relative difference of each step's losses; infinite where a run has other steps, or a loss that is no number."""
    if len(one.losses) != len(other.losses) or not one.losses:
        return [inf]
    # If fp16 overflowed in both, both losses may be no number.
    excused = one.excused & other.excused
    pairs = enumerate(zip(one.losses, other.losses, strict=True))
    return [_relative(first, second, step in excused) for step, (first, second) in pairs]


def _relative(first: float, second: float, excused: bool) -> float:
    if not (isfinite(first) and isfinite(second)):
        return 0.0 if excused else inf
    return abs(first - second) / max(abs(first), abs(second)) if first != second else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _spent(rank: RankResult, start: int, end: int) -> float:
    return sum(rank.data_seconds[start:end]) + sum(rank.step_seconds[start:end])


def _start_up(rank: RankResult) -> float:
    first, *later = rank.step_seconds
    return max(0.0, first - median(later)) if later else 0.0
