"""Goals of a benchmark: a figure of several rounds, its interval, the goal, and what that says."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tunetool.accept.judge import HELD, MISSED, OPEN, verdict_of
from tunetool.measure.statistics import estimate

__all__ = ["HELD", "MISSED", "OPEN", "VERDICT", "figure", "line", "line_within", "status"]

VERDICT = re.compile(rf": ({HELD}|{MISSED}|{OPEN})$")
"""The end of a goal's line."""


def figure(title: str, values: Sequence[float], digits: int = 2) -> str:
    """A figure and its interval, without a goal."""
    interval = estimate(values)
    middle, low, high = (f"{value:.{digits}f}" for value in (interval.value, interval.low, interval.high))
    return f"{title}: {middle} [{low} to {high}, {interval.level:.0%}], {len(values)} rounds"


def line(title: str, values: Sequence[float], goal: float, at_least: bool = True) -> str:
    """Print the line of a goal; returns its verdict, which is not decided before ``ENOUGH`` values."""
    word = verdict_of(values, goal, at_least)
    print(f"{figure(title, values)}; goal: {'at least' if at_least else 'at most'} {goal:g}: {word}")
    return word


def line_within(title: str, values: Sequence[float], least: float, most: float) -> str:
    """As ``line``, for a figure that has to lie between two bounds."""
    words = {verdict_of(values, least), verdict_of(values, most, at_least=False)}
    word = next(each for each in (MISSED, OPEN, HELD) if each in words)
    print(f"{figure(title, values, digits=3)}; goal: {least:g} to {most:g}: {word}")
    return word


def status(words: Sequence[str]) -> int:
    """The exit status of a program with these verdicts."""
    return 1 if MISSED in words else 3 if OPEN in words else 0
