"""Candidates in rounds: which one leads, which are dropped, and whether more rounds could change that. Pure.

Every candidate of a round is measured once, in random order, so that drift affects all of them equally. Rates are
compared as logarithms, so that ratios count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import log, log2, sqrt
from statistics import median

from tunetool.measure import Direction
from tunetool.tune.goals import Goal, Mix, parts
from tunetool.tune.settings import DEFAULTS, NAMES, AioSettings

OUT = 3.0
"""Standard errors behind the leader at which a candidate is dropped: 1 in 700 for one that is equally good."""
SURE = 2.0
ENOUGH = 0.02
"""Smallest relative gain that the search looks for."""
_MEDIAN_COST = 1.2533
"""Standard error of a median over that of a mean (sqrt(pi / 2))."""
_MAD = 1.4826
_FEWEST_RESIDUALS = 12


@dataclass
class Rounds:
    """Bytes per second by setting, direction and round; a discarded sample leaves a gap."""

    rates: dict[AioSettings, dict[Direction, dict[int, float]]] = field(default_factory=dict)
    count: int = 0

    def add(self, settings: AioSettings, direction: Direction, rate: float) -> None:
        """Add a sample of the present round."""
        self.rates.setdefault(settings, {}).setdefault(direction, {})[self.count] = rate

    def speeds(self, settings: AioSettings, goal: Goal, mix: Mix) -> dict[int, float]:
        """Bytes per second of ``settings`` for ``goal``, by round."""
        rates = self.rates.get(settings, {})
        sides = [rates.get(direction, {}) for direction in parts(goal)]
        if goal != "mix":
            return dict(sides[0])
        writes, reads = sides
        return {number: mix.speed(reads[number], writes[number]) for number in reads.keys() & writes.keys()}


@dataclass(frozen=True)
class Standing:
    """One goal's race after some rounds."""

    scores: Mapping[AioSettings, float]
    """Logarithms of speed without the effect of the round, for all measured settings."""
    counts: Mapping[AioSettings, int]
    noise: float | None
    """Standard deviation of one sample; None: too few samples."""

    @property
    def order(self) -> list[AioSettings]:
        """The settings, best first; of equals the one nearer to DeepSpeed's default first."""
        return sorted(self.scores, key=lambda each: (-self.scores[each], distance(each)))

    def error(self, first: AioSettings, second: AioSettings) -> float | None:
        """Standard error of the difference of two scores."""
        if self.noise is None:
            return None
        return _MEDIAN_COST * self.noise * sqrt(1 / self.counts[first] + 1 / self.counts[second])

    def _leader(self, alive: Sequence[AioSettings]) -> AioSettings | None:
        return next((each for each in self.order if each in alive), None)

    def out(self, alive: Sequence[AioSettings]) -> list[AioSettings]:
        """The settings in ``alive`` that are significantly slower than the best of them."""
        leader = self._leader(alive)
        behind: list[AioSettings] = []
        for each in alive:
            if leader is None or each == leader:
                continue
            error = self.error(leader, each)
            if error is not None and self.scores[leader] - self.scores[each] > OUT * error:
                behind.append(each)
        return behind

    def settled(self, alive: Sequence[AioSettings]) -> bool:
        """Whether no setting in ``alive`` can still be noticeably better than the leader."""
        leader = self._leader(alive)
        for each in alive:
            if leader is None or each == leader:
                continue
            error = self.error(leader, each)
            if error is None or self.scores[each] - self.scores[leader] + SURE * error > log(1 + ENOUGH):
                return False
        return True


def standing(rounds: Rounds, goal: Goal, mix: Mix, alive: Sequence[AioSettings]) -> Standing:
    """The state of ``goal``'s race; ``alive`` are compared with each other in the rounds that they share."""
    logs = {
        each: {number: log(speed) for number, speed in rounds.speeds(each, goal, mix).items()} for each in rounds.rates
    }
    logs = {each: by_round for each, by_round in logs.items() if by_round}
    level = {}
    for number in range(rounds.count + 1):
        present = [logs[each][number] for each in alive if number in logs.get(each, {})]
        if present:
            level[number] = median(present)
    over_median = {
        each: [value - level[number] for number, value in by_round.items() if number in level]
        for each, by_round in logs.items()
    }
    over_median = {each: values for each, values in over_median.items() if values}
    scores = {each: _middle(values) for each, values in over_median.items()}
    residuals = [
        abs(value - median(values)) * sqrt(len(values) / (len(values) - 1))
        for each, values in over_median.items()
        if len(values) > 1
        for value in values
    ]
    noise = _MAD * median(residuals) if len(residuals) >= _FEWEST_RESIDUALS else None
    return Standing(
        shrunk(scores, {each: len(values) for each, values in over_median.items()}, noise), _counts(over_median), noise
    )


def shrunk(
    scores: Mapping[AioSettings, float], counts: Mapping[AioSettings, int], noise: float | None
) -> dict[AioSettings, float]:
    """Scores shrunk towards the average effect of each parameter's values, in proportion to the noise.

    One noisy sample of one setting says little; the samples of all settings that share a value with it say more
    (empirical Bayes, Efron and Morris, JASA 70, 1975).
    """
    if noise is None or len(scores) < 8:
        return dict(scores)
    model = additive(scores)
    spread = sum((scores[each] - model[each]) ** 2 for each in scores) / len(scores)
    drawn = {}
    for each, score in scores.items():
        chance = (_MEDIAN_COST * noise) ** 2 / counts[each]
        weight = max(0.0, spread - chance) / max(spread, 1e-12)
        drawn[each] = weight * score + (1 - weight) * model[each]
    return drawn


def additive(scores: Mapping[AioSettings, float]) -> dict[AioSettings, float]:
    """The best sum of one effect per parameter value, by iterating over the parameters until it converges."""
    # By place in a list: hashing settings would cost more than the sums.
    every, wanted = list(scores), list(scores.values())
    model = [sum(wanted) / len(wanted)] * len(wanted)
    groups: list[list[list[int]]] = []
    for name in NAMES:
        by_value: dict[int | bool, list[int]] = {}
        for index, each in enumerate(every):
            by_value.setdefault(getattr(each, name), []).append(index)
        if len(by_value) > 1:
            groups.append(list(by_value.values()))
    for _ in range(8):
        for values in groups:
            for indices in values:
                effect = sum(wanted[index] - model[index] for index in indices) / len(indices)
                for index in indices:
                    model[index] += effect
    return dict(zip(every, model, strict=True))


@cache
def distance(settings: AioSettings) -> float:
    """Distance from DeepSpeed's default in doublings; prefers fewer threads and requests, and less memory."""
    sizes = ("block_size", "queue_depth", "intra_op_parallelism")
    flags = ("single_submit", "overlap_events", "use_gds")
    ours, theirs = settings.block(), DEFAULTS.block()
    return sum(abs(log2(ours[name] / theirs[name])) for name in sizes) + sum(
        ours[name] != theirs[name] for name in flags
    )


def neighbours(settings: AioSettings, space: Sequence[AioSettings]) -> list[AioSettings]:
    """The settings of ``space`` that differ from ``settings`` in one parameter."""
    return [each for each in space if sum(getattr(each, name) != getattr(settings, name) for name in NAMES) == 1]


def _middle(values: Sequence[float]) -> float:
    """The median; of two the higher one, because other work only slows a sample down."""
    return max(values) if len(values) == 2 else median(values)


def _counts(over_median: Mapping[AioSettings, Sequence[float]]) -> dict[AioSettings, int]:
    return {each: len(values) for each, values in over_median.items()}
