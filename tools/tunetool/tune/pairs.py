"""The end of a search: compares the finalists with DeepSpeed's default in pairs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tunetool.errors import CannotJudge
from tunetool.measure.statistics import DIFFERENCE_ERROR, Difference, Estimate, coverage, difference, significant
from tunetool.tune.goals import Goal, Mix
from tunetool.tune.race import ENOUGH, Rounds, distance
from tunetool.tune.settings import DEFAULTS, AioSettings

PAIRS = (6, 12, 24)
"""Numbers of pairs after which a finalist is compared with the default, if the time allows."""
EARLY = 0.1
"""Share of the error probability for each look before the last one: an early end must be clear."""
SHOWN = 0.99
"""Level of the intervals: 95 % over two tests and two finalists."""
_ALIKE = 0.99
"""Relative difference below which finalists are equally good; the one nearest to the default is chosen."""


@dataclass(frozen=True)
class Choice:
    """The choice for one goal: the default, unless another setting is significantly faster."""

    goal: Goal
    settings: AioSettings
    rate: float
    default_rate: float
    gain: Difference
    """Ratio to the default over fresh pairs; if the default is kept, that of the best finalist."""
    interval: Estimate
    """Number of pairs of that ratio."""
    best: AioSettings
    """The fastest setting in the pairs, significant or not."""
    pairs: int
    rivals: bool = False
    """Whether another finalist may still be noticeably faster than the chosen one."""

    @property
    def significant(self) -> bool:
        """Whether it differs from DeepSpeed's default."""
        return self.settings != DEFAULTS


def choose(rounds: Rounds, goal: Goal, mix: Mix, candidates: Sequence[AioSettings], last: bool = True) -> Choice:
    """The default, or a setting that is significantly faster in the pairs with it."""
    base = rounds.speeds(DEFAULTS, goal, mix)
    if len(base) < PAIRS[0]:
        raise too_few(len(base), rounds.count)
    pairs = {}
    for each in candidates:
        speeds = rounds.speeds(each, goal, mix)
        shared = sorted(base.keys() & speeds.keys())
        if len(shared) >= PAIRS[0]:
            pairs[each] = ([base[number] for number in shared], [speeds[number] for number in shared])
    gains = {each: held_against(*values) for each, values in pairs.items()}
    spent = 1 - EARLY * (len(PAIRS) - 1) if last else EARLY
    looked = [min(1.0, gain.probability / spent) for gain in gains.values()]
    # What is called faster is so by the interval that is shown beside it too: the tests may see a shift of all samples
    # where the pairs decide nothing.
    faster = [
        each
        for each, counts in zip(gains, significant(looked), strict=True)
        if counts and interval_of(_ratios(pairs[each])).low > 1.0
    ]
    middle = median(base.values())
    order = sorted(gains, key=lambda each: -gains[each].ratio)
    best = order[0] if order and gains[order[0]].ratio > 1.0 else DEFAULTS
    taken = DEFAULTS
    if faster:
        top = max(gains[each].ratio for each in faster)
        taken = min((each for each in faster if gains[each].ratio >= _ALIKE * top), key=distance)
    described = taken if faster else (order[0] if order else DEFAULTS)
    ratios = _ratios(pairs[described]) if described in pairs else [1.0] * len(base)
    rates = rounds.speeds(taken, goal, mix).values()
    gain = gains.get(described) or Difference(1.0, 1.0, 1.0)
    rivals = any(_may_beat(rounds.speeds(taken, goal, mix), rounds.speeds(each, goal, mix)) for each in candidates)
    return Choice(goal, taken, median(rates), middle, gain, interval_of(ratios), best, len(ratios), rivals)


def _ratios(pair: tuple[Sequence[float], Sequence[float]]) -> list[float]:
    return [second / first for first, second in zip(*pair, strict=True)]


def held_against(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Compare the second set with the first, pair by pair: the smaller p of two tests, with Bonferroni's correction.

    The rank-sum test is stronger with few samples, the sign test of the pairs if the machine's speed drifts.
    """
    ratios = _ratios((first, second))
    wins = sum(ratio > 1 for ratio in ratios)
    signs = 1 - coverage(len(ratios), min(wins, len(ratios) - wins))
    ranks = difference(first, second)
    return Difference(median(ratios), min(1.0, 2 * min(ranks.probability, signs)), min(1.0, 2 * ranks.least))


def interval_of(ratios: Sequence[float]) -> Estimate:
    """Median over pairs, and the narrowest order statistics that contain the true median with ``SHOWN``, if any do."""
    count, ordered = len(ratios), sorted(ratios)
    trimmed = max((cut for cut in range(count // 2) if coverage(count, cut) >= SHOWN), default=0)
    method = f"order statistics {trimmed + 1} and {count - trimmed} of {count} ratios, pair by pair"
    return Estimate(median(ordered), ordered[trimmed], ordered[count - 1 - trimmed], coverage(count, trimmed), method)


def too_few(pairs: int, rounds: int) -> CannotJudge:
    """The error for too few pairs, with a hint."""
    if rounds >= PAIRS[0]:
        return CannotJudge(
            f"only {pairs} samples of DeepSpeed's default could be proven, {PAIRS[0]} are needed",
            "stop what else uses the drives (see `pidstat -d 1`), or give a longer `--budget`",
        )
    return CannotJudge(
        f"the time was too short: {pairs} pairs of the best settings and the default were taken, {PAIRS[0]} are needed",
        "give a longer `--budget`, or fewer settings with `--space`",
    )


def _may_beat(taken: Mapping[int, float], rival: Mapping[int, float]) -> bool:
    """Whether ``rival`` looks noticeably faster, or is only by chance not."""
    if not rival:
        return False
    gain = difference(list(taken.values()), list(rival.values()))
    return gain.ratio > 1 + ENOUGH or (1 - ENOUGH > gain.ratio > 1 - 4 * ENOUGH and gain.probability > DIFFERENCE_ERROR)
