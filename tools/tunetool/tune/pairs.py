"""The end of a search: what leads, pair by pair against DeepSpeed's default. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tunetool.errors import CannotJudge
from tunetool.measure.comparison import ERROR, Difference, difference, significant
from tunetool.measure.statistics import Estimate, coverage
from tunetool.tune.goals import Goal, Mix
from tunetool.tune.race import ENOUGH, Rounds, distance
from tunetool.tune.settings import DEFAULTS, AioSettings

PAIRS = (6, 12, 24)
"""After how many pairs a finalist is held against the default, if the time lasts."""
EARLY = 0.1
"""Share of the error that each look before the last may spend: an early end must be clear."""
SHOWN = 0.99
"""Level of the intervals: what two tests and two finalists leave of 95 %."""
_ALIKE = 0.99
"""Finalists this near to the best are as good, and the one nearest to the default is taken."""


@dataclass(frozen=True)
class Choice:
    """What one goal ends with: the default, unless something is significantly faster."""

    goal: Goal
    settings: AioSettings
    rate: float
    default_rate: float
    gain: Difference
    """Against the default, over fresh pairs; of the best that was tried, where the default is kept."""
    interval: Estimate
    """Of that ratio."""
    best: AioSettings
    """Fastest of all in the pairs, significant or not."""
    pairs: int
    rivals: bool = False
    """Whether another finalist may still be noticeably faster than the one that was taken."""

    @property
    def significant(self) -> bool:
        """Whether it is another than DeepSpeed's own."""
        return self.settings != DEFAULTS


def choose(rounds: Rounds, goal: Goal, mix: Mix, candidates: Sequence[AioSettings], last: bool = True) -> Choice:
    """The default, or what is significantly faster in the pairs with it."""
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
    faster = [
        each for each, counts in zip(gains, significant(looked), strict=True) if counts and gains[each].ratio > 1.0
    ]
    middle = median(base.values())
    order = sorted(gains, key=lambda each: -gains[each].ratio)
    best = order[0] if order and gains[order[0]].ratio > 1.0 else DEFAULTS
    taken = DEFAULTS
    if faster:
        top = max(gains[each].ratio for each in faster)
        taken = min((each for each in faster if gains[each].ratio >= _ALIKE * top), key=distance)
    described = taken if faster else (order[0] if order else DEFAULTS)
    ratios = [b / a for a, b in zip(*pairs[described], strict=True)] if described in pairs else [1.0] * len(base)
    rates = rounds.speeds(taken, goal, mix).values()
    gain = gains.get(described) or Difference(1.0, 1.0, 1.0)
    rivals = any(_may_beat(rounds.speeds(taken, goal, mix), rounds.speeds(each, goal, mix)) for each in candidates)
    return Choice(goal, taken, median(rates), middle, gain, interval_of(ratios), best, len(ratios), rivals)


def held_against(first: Sequence[float], second: Sequence[float]) -> Difference:
    """The second set against the first, pair by pair: the more certain of two tests, paid for (Bonferroni).

    The rank-sum test sees more in few samples, the sign test of the pairs more where the machine's speed wanders.
    """
    ratios = [b / a for a, b in zip(first, second, strict=True)]
    wins = sum(ratio > 1 for ratio in ratios)
    signs = 1 - coverage(len(ratios), min(wins, len(ratios) - wins))
    ranks = difference(first, second)
    return Difference(median(ratios), min(1.0, 2 * min(ranks.probability, signs)), min(1.0, 2 * ranks.least))


def interval_of(ratios: Sequence[float]) -> Estimate:
    """Median over pairs and the narrowest order statistics that hold the true one with ``SHOWN``, if any do."""
    count, ordered = len(ratios), sorted(ratios)
    trimmed = max((cut for cut in range(count // 2) if coverage(count, cut) >= SHOWN), default=0)
    method = f"order statistics {trimmed + 1} and {count - trimmed} of {count} ratios, pair by pair"
    return Estimate(median(ordered), ordered[trimmed], ordered[count - 1 - trimmed], coverage(count, trimmed), method)


def too_few(pairs: int, rounds: int) -> CannotJudge:
    """Why so few pairs allow no answer, and what to do about it."""
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
    return gain.ratio > 1 + ENOUGH or (1 - ENOUGH > gain.ratio > 1 - 4 * ENOUGH and gain.probability > ERROR)
