"""Figures side by side as dots with their intervals, and levels such as a ceiling across all of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from tunetool.record import Measurement
from tunetool.view.curves import mark_line, ticks
from tunetool.view.plots import bar_of, picture
from tunetool.view.text import number

_WIDTH, _LEFT, _RIGHT, _TOP, _PLOT, _FOOT, _LINE = 760, 56, 14, 30, 134, 26, 15
_LETTER = 6.2
"""Width of a letter at the size of these pictures, or a little more."""
_FAR = 2.0
"""A level that is further above the highest dot would flatten all of them: it is written, not drawn."""


@dataclass(frozen=True)
class Point:
    """One figure, all in the unit of the picture; a point without an interval has its value at both ends."""

    name: str
    value: float
    low: float
    high: float
    colour: str
    radius: float = 2.5
    pin: str = ""
    """Written above the dots, with a line down to this one."""
    below: str = ""
    """Written below it, as far as there is room."""


@dataclass(frozen=True)
class Level:
    """A dashed line across the picture, with its name where it has one."""

    name: str
    value: float


def point_of(name: str, figure: Measurement, colour: str, unit: float) -> Point:
    """A measurement in units of ``unit``."""
    bar = bar_of(name, figure, colour, unit)
    return Point(bar.name, bar.value, bar.low, bar.high, colour)


def points(title: str, said: str, given: Sequence[Point], levels: Sequence[Level] = (), below: str = "") -> str:
    """The picture; ``given`` is not empty. ``said``: its text for those who do not see it; ``below``: its last line."""
    top = max([0.0, *(max(point.value, point.high) for point in given)])
    low = min([0.0, *(min(point.value, point.low) for point in given)])
    top = top if top > low else 1.0
    drawn = sorted((level for level in levels if level.value <= _FAR * top), key=lambda level: -level.value)
    far = [level for level in levels if level not in drawn and level.name]
    marks = ticks(low, max([top, *(level.value for level in drawn)]), 4)
    pins = [(index, point) for index, point in enumerate(given) if point.pin]
    start = _TOP + _LINE * (len(pins) + bool(far))
    labelled = any(point.below for point in given)
    end = start + _PLOT
    height = end + _FOOT + (_LINE if labelled else 0)
    right = _WIDTH - max([_RIGHT, *(len(_shown(level)) * _LETTER + 8 for level in drawn if level.name)])
    step = (right - _LEFT) / len(given)

    def down(value: float) -> float:
        return start + (marks[-1] - value) / (marks[-1] - marks[0]) * _PLOT

    parts = [*picture(_WIDTH, height, said, size=11), f'<text x="4" y="16" font-size="13">{escape(title)}</text>']
    for mark in marks:
        parts += mark_line(mark, down(mark), _LEFT, right)
    for row, (index, point) in enumerate(pins):
        parts += _pin(point, _LEFT + (index + 0.5) * step, _TOP + _LINE * row, down(point.high))
    for index, point in enumerate(given):
        parts += _dot(point, _LEFT + (index + 0.5) * step, down)
    parts += _levels(drawn, right, down)
    if far:
        shown = "; ".join(f"{_shown(level)}, far above" for level in far)
        parts.append(_text(_WIDTH - _RIGHT, start - 8, shown, "end"))
    if labelled:
        parts += _labels(given, step, end + _LINE)
    parts.append(_text(_WIDTH - _RIGHT, height - 8, below, "end"))
    return "\n".join([*parts, "</svg>"])


def words(point: Point) -> str:
    """The point for those who do not see it."""
    spread = f" ({number(point.low)} to {number(point.high)})" if point.high > point.low else ""
    return f"{point.name} {number(point.value)}{spread}"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _whisker(x1: float, x2: float, y1: float, y2: float, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    place = f'x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"'
    return f'<line class="whisker" {place} stroke="#1f2328"{dashed}/>'


def _dot(point: Point, x: float, down: Callable[[float], float]) -> Iterator[str]:
    if point.high > point.low:
        yield _whisker(x, x, down(point.low), down(point.high))
    yield (
        f'<circle cx="{x:.1f}" cy="{down(point.value):.1f}" r="{point.radius:g}" fill="{point.colour}">'
        f"<title>{escape(words(point))}</title></circle>"
    )


def _pin(point: Point, x: float, y: float, to: float) -> Iterator[str]:
    """The text beside the upper end of the line, where there is more room."""
    yield _whisker(x, x, y - 8, to, "1 2")
    left = x < _WIDTH / 2
    yield _text(x + 5 if left else x - 5, y, point.pin, "start" if left else "end")


def _shown(level: Level) -> str:
    return f"{level.name} {number(level.value)}"


def _levels(levels: Sequence[Level], right: float, down: Callable[[float], float]) -> Iterator[str]:
    """The lines, the highest first, with their names right of them; those of two that are near do not meet."""
    last = -math.inf
    for level in levels:
        y = down(level.value)
        yield _whisker(_LEFT, right, y, y, "4 3")
        if level.name:
            last = max(y + 4, last + _LINE)
            yield _text(right + 6, last, _shown(level), "start")


def _labels(given: Sequence[Point], step: float, y: float) -> Iterator[str]:
    """Every so many, that none touches the next."""
    widest = max(len(point.below) for point in given) * _LETTER + 12
    every = max(1, math.ceil(widest / step))
    half = widest / 2
    for index in range(0, len(given), every):
        x = min(max(_LEFT + (index + 0.5) * step, half), _WIDTH - half)
        yield _text(x, y, given[index].below, "middle")
