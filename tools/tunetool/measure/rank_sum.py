"""Tests whether two sets of samples differ by more than chance. Exact and distribution-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

ERROR = 0.05
"""Probability that a whole comparison reports a difference where there is none."""

METHOD = "two-sided Wilcoxon-Mann-Whitney rank-sum test, exact by permutation, with Holm's correction at 5 %"


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
        if probabilities[index] > ERROR / (len(probabilities) - step):
            break
        differs[index] = True
    return differs
