"""Statistics of samples: the median, its confidence interval, a test for a trend, and a test whether two sets differ by
more than chance. Pure.

Bandwidth samples are few and skewed (a neighbour, a garbage collection only ever slow a drive down), so nothing here
assumes a normal distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, factorial
from statistics import median

LOOKS: tuple[tuple[int, int], ...] = ((6, 0), (9, 0), (12, 1), (15, 2))
"""After how many samples an interval is looked at, and how many it leaves out at either end.

Looking again after more samples is another chance to err. The errors of all four looks add up to 4.9 % (Bonferroni),
so a verdict holds at 95 % however many of them it took.
"""

FEW, WIDENING = 3, 15.0
"""The fewest ratios that decide which of two is faster, and by how many times its own width, on a scale of logarithms,
an interval of so few is widened at either end before it may.

Three on one side of 1 are chance once in four times, so they have to lie closely together far from 1 as well. Of ratios
that are densest at 1, three lie on one side, ``k`` times their range from 1 or farther, with a probability of at most
1/4 / (1 + k)^2: 0.1 % for 15 (the worst case: logarithms that are spread evenly). With the four looks of ``LOOKS`` that
is 5 %. From ``ENOUGH`` on the interval itself decides, whatever the distribution.
"""
ENOUGH = 5
"""Fewest ratios whose range decides: the range of five holds the median with 94 %."""

TREND_ERROR = 0.01
"""Probability that samples without a trend are reported to have one."""


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval."""

    value: float
    low: float
    high: float
    level: float
    """Probability that the interval holds the true median."""
    method: str


@dataclass(frozen=True)
class Drift:
    """How samples change over time."""

    slope_per_second: float
    significant: bool
    change: float
    """From the first to the last sample, as a fraction of their median; negative: falling."""


def coverage(count: int, trimmed: int) -> float:
    """Probability that the true median lies between the order statistics ``trimmed`` + 1 and ``count`` - ``trimmed``.

    The sign test turned round: each sample lies below the median with probability 1/2, whatever its distribution
    (Conover, Practical Nonparametric Statistics, 3rd ed., section 3.2).
    """
    outside = sum(comb(count, below) for below in range(trimmed + 1))
    return max(0.0, 1.0 - 2.0 * outside / (1 << count))


def estimate(samples: Sequence[float]) -> Estimate:
    """Median and its interval. ``samples`` is not empty; fewer than six cannot reach ``LEVEL``, and say so."""
    count = len(samples)
    trimmed = max((cut for least, cut in LOOKS if least <= count), default=0)
    ordered = sorted(samples)
    if trimmed:
        method = f"order statistics {trimmed + 1} and {count - trimmed} of {count} samples"
    else:
        method = f"range of {count} samples"
    return Estimate(median(ordered), ordered[trimmed], ordered[count - 1 - trimmed], coverage(count, trimmed), method)


def excludes_one(interval: Estimate, count: int) -> bool:
    """Whether ``count`` ratios, of which this is the interval, decide that the true one is not 1."""
    low, high = interval.low, interval.high
    if count < FEW or low <= 0:
        return False
    if count < ENOUGH:
        wider = (high / low) ** WIDENING
        low, high = low / wider, high * wider
    return not low <= 1 <= high


def next_look(count: int) -> int | None:
    """How many samples the next look needs; None when there is none left."""
    return next((least for least, _ in LOOKS if least > count), None)


def drift(times: Sequence[float], samples: Sequence[float]) -> Drift:
    """Slope (Theil and Sen: the median over all pairs) and its significance (Mann and Kendall, exact).

    ``times`` are seconds, rising, one for each sample. Sen, JASA 63 (1968) 1379; Mann, Econometrica 13 (1945) 245.
    """
    pairs = [(first, second) for second in range(len(samples)) for first in range(second)]
    if not pairs:
        return Drift(0.0, significant=False, change=0.0)
    slope = median((samples[b] - samples[a]) / (times[b] - times[a]) for a, b in pairs)
    score = sum((samples[b] > samples[a]) - (samples[b] < samples[a]) for a, b in pairs)
    middle = median(samples)
    change = slope * (times[-1] - times[0]) / middle if middle else 0.0
    return Drift(slope, kendall_probability(len(samples), score) <= TREND_ERROR, change)


def kendall_probability(count: int, score: int) -> float:
    """Probability that ``count`` samples in random order have a Kendall score at least as far from 0 as ``score``.

    Exact: the score is the number of pairs in order less those out of order, and permutations by number of inversions
    are counted by Mahonian numbers. Ties only lower a score, and so err towards no drift.
    """
    inversions = [1]
    for size in range(2, count + 1):
        longer = [0] * (len(inversions) + size - 1)
        for base, ways in enumerate(inversions):
            for step in range(size):
                longer[base + step] += ways
        inversions = longer
    pairs = len(inversions) - 1
    extreme = sum(ways for number, ways in enumerate(inversions) if abs(pairs - 2 * number) >= abs(score))
    return extreme / factorial(count)


DIFFERENCE_ERROR = 0.05
"""Probability that a whole comparison reports a difference where there is none."""

DIFFERENCE_METHOD = "two-sided Wilcoxon-Mann-Whitney rank-sum test, exact by permutation, with Holm's correction at 5 %"


@dataclass(frozen=True)
class Difference:
    """The second set against the first."""

    ratio: float
    """Of the medians, second to first."""
    probability: float
    """Probability that chance alone separates two equal sets at least this far."""
    least: float
    """The smallest probability that so few samples can reach at all."""


def difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Compare two sets; neither is empty."""
    size, total = len(first), len(first) + len(second)
    ranks = doubled_ranks([*first, *second])
    expected = size * (total + 1)
    observed = sum(ranks[:size])
    ways = rank_sums(ranks, size)
    extreme = sum(count for value, count in ways.items() if abs(value - expected) >= abs(observed - expected))
    everything = comb(total, size)
    middle = median(first)
    ratio = median(second) / middle if middle else float("inf")
    return Difference(ratio, extreme / everything, min(1.0, 2 / everything))


def doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the rank of each value, so that a tie's middle rank is a whole number."""
    ordered = sorted(values)
    low = {value: rank for rank, value in reversed(list(enumerate(ordered, start=1)))}
    high = {value: rank for rank, value in enumerate(ordered, start=1)}
    return [low[value] + high[value] for value in values]


def rank_sums(ranks: Sequence[int], size: int) -> dict[int, int]:
    """In how many ways ``size`` of ``ranks`` add up to each sum."""
    chosen: list[dict[int, int]] = [{0: 1}, *({} for _ in range(size))]
    for rank in ranks:
        for count in range(size, 0, -1):
            for value, ways in chosen[count - 1].items():
                chosen[count][value + rank] = chosen[count].get(value + rank, 0) + ways
    return chosen[size]


def significant(probabilities: Sequence[float]) -> list[bool]:
    """Which of several differences are significant at 5 % over all (Holm, Scand. J. Stat. 6, 1979)."""
    differs = [False] * len(probabilities)
    order = sorted(range(len(probabilities)), key=lambda index: probabilities[index])
    for step, index in enumerate(order):
        if probabilities[index] > DIFFERENCE_ERROR / (len(probabilities) - step):
            break
        differs[index] = True
    return differs
