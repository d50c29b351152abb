"""Goals of a benchmark: a figure of several rounds, its interval, the goal, and what that says."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tunetool.measure.statistics import ENOUGH, estimate

HELD, MISSED, OPEN = "held", "missed", "not decided"
VERDICT = re.compile(rf": ({HELD}|{MISSED}|{OPEN})$")
"""The end of a goal's line."""


def verdict(low: float, high: float, goal: float, at_least: bool) -> str:
    """Whether the whole interval is on the goal's side (held), on the other (missed), or on both."""
    if not at_least:
        low, high, goal = -high, -low, -goal
    return HELD if low >= goal else MISSED if high < goal else OPEN


def figure(title: str, values: Sequence[float], digits: int = 2) -> str:
    """A figure and its interval, without a goal."""
    interval = estimate(values)
    middle, low, high = (f"{value:.{digits}f}" for value in (interval.value, interval.low, interval.high))
    return f"{title}: {middle} [{low} to {high}, {interval.level:.0%}], {len(values)} rounds"


def line(title: str, values: Sequence[float], goal: float, at_least: bool = True) -> str:
    """Print the line of a goal; returns its verdict, which is not decided before ``ENOUGH`` values."""
    interval = estimate(values)
    word = verdict(interval.low, interval.high, goal, at_least) if len(values) >= ENOUGH else OPEN
    print(f"{figure(title, values)}; goal: {'at least' if at_least else 'at most'} {goal:g}: {word}")
    return word


def line_within(title: str, values: Sequence[float], least: float, most: float) -> str:
    """As ``line``, for a figure that has to lie between two bounds."""
    interval = estimate(values)
    words = {verdict(interval.low, interval.high, least, True), verdict(interval.low, interval.high, most, False)}
    word = OPEN if len(values) < ENOUGH else next(each for each in (MISSED, OPEN, HELD) if each in words)
    print(f"{figure(title, values, digits=3)}; goal: {least:g} to {most:g}: {word}")
    return word


def status(words: Sequence[str]) -> int:
    """The exit status of a program with these verdicts."""
    return 1 if MISSED in words else 3 if OPEN in words else 0
