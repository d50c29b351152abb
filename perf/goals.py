"""Goals of a benchmark: a figure of several rounds, its interval, the goal, and what that says."""

from __future__ import annotations

from collections.abc import Sequence

from tunetool.measure.statistics import estimate

HELD, MISSED, OPEN = "held", "missed", "not decided"
ROUNDS = 5
"""Fewest rounds that decide anything: the range of five holds the median with a probability of 94 %."""


def verdict(low: float, high: float, goal: float, at_least: bool) -> str:
    """Whether the whole interval is on the goal's side (held), on the other (missed), or on both."""
    if not at_least:
        low, high, goal = -high, -low, -goal
    return HELD if low >= goal else MISSED if high < goal else OPEN


def line(title: str, values: Sequence[float], goal: float, at_least: bool = True) -> str:
    """Print the line of a goal; returns its verdict, which is not decided before ``ROUNDS`` values."""
    interval = estimate(values)
    word = verdict(interval.low, interval.high, goal, at_least) if len(values) >= ROUNDS else OPEN
    print(
        f"{title}: {interval.value:.2f} [{interval.low:.2f} to {interval.high:.2f}, {interval.level:.0%}], "
        f"{len(values)} rounds; goal: {'at least' if at_least else 'at most'} {goal:g}: {word}"
    )
    return word


def status(words: Sequence[str]) -> int:
    """The exit status of a program with these verdicts."""
    return 1 if MISSED in words else 3 if OPEN in words else 0
