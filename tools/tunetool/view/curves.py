"""Curves over time as SVG, one line for each worker; thinning keeps the peaks. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from tunetool.view.plots import picture
from tunetool.view.text import number, scale

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 760, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 30, 34
_COLUMNS = 300
"""Number of columns of a plot; a line keeps its least and greatest value in each of them."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#5c5c5c")
"""The palette of Okabe and Ito, which colour-blind readers can distinguish; from the ninth line on dashed."""
_DASHES = ("", "6 3", "2 3", "8 3 2 3")


@dataclass(frozen=True)
class Line:
    """One worker's curve: pairs of seconds, or of what the plot counts, and a value in its unit."""

    name: str
    points: Points


def colour(index: int) -> str:
    """The colour of the line with this index."""
    return COLOURS[index % len(COLOURS)]


def dashes(index: int) -> str:
    """The SVG stroke-dasharray of the line with this index; empty for a solid line."""
    return _DASHES[index // len(COLOURS) % len(_DASHES)]


def legend_of(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Name, colour and dashes of each line of a plot."""
    return [(name, colour(index), dashes(index) or "none") for index, name in enumerate(names)]


def plot(
    title: str,
    unit: str,
    lines: Sequence[Line],
    until: float,
    across: str = "seconds since the start",
    most_ticks: int = 10,
) -> str:
    """A plot from second 0 to ``until``. The scale starts at 0, or below where a value is, and reaches 100 for %.

    ``across``: what is counted in place of seconds.
    """
    drawn = [[point for point in line.points if math.isfinite(point[1])] for line in lines]
    values = [value for points in drawn for _, value in points] or [0.0]
    factor, shown_unit = scale(unit, max(abs(value) for value in values))
    low = min(0.0, min(values) / factor)
    high = max(100.0 if unit == "%" else 0.0, max(values) / factor)
    marks = ticks(low, high if high > low else low + 1.0)
    low, high = min(low, marks[0]), max(high, marks[-1])
    width, height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    until = until or 1.0

    def to_pixels(second: float, value: float) -> tuple[float, float]:
        return _LEFT + second / until * width, _TOP + (high - value) / (high - low) * height

    label = f"{title}, {shown_unit}" if shown_unit else title
    said = [
        f"{line.name} from {number(points[0][1] / factor)} to {number(points[-1][1] / factor)}"
        for line, points in zip(lines, drawn, strict=True)
        if points
    ]
    parts = [
        *picture(WIDTH, HEIGHT, f"{label}: {'; '.join(said)}", size=11),
        f'<text x="4" y="16" font-size="13">{escape(label)}</text>',
    ]
    for mark in marks:
        parts += mark_line(mark, to_pixels(0.0, mark)[1], _LEFT, WIDTH - _RIGHT)
    for mark in ticks(0.0, until, most_ticks):
        if mark <= until:
            x, _ = to_pixels(mark, low)
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 18}" text-anchor="middle">{mark:g}</text>')
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(across)}</text>')
    for index, points in enumerate(drawn):
        scaled = [to_pixels(second, value / factor) for second, value in thinned(points, until)]
        style = f'fill="none" stroke="{colour(index)}" stroke-width="1.3" stroke-dasharray="{dashes(index) or "none"}"'
        name = escape(lines[index].name)
        if len(scaled) == 1:
            x, y = scaled[0]
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour(index)}"><title>{name}</title></circle>'
            )
        elif scaled:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in scaled)
            parts.append(f'<polyline points="{path}" {style}><title>{name}</title></polyline>')
    return "\n".join([*parts, "</svg>"])


def mark_line(mark: float, y: float, left: float, right: float) -> list[str]:
    """A line across a plot with its value on the left."""
    return [
        f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d0d7de"/>',
        f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{mark:g}</text>',
    ]


def thinned(points: Points, until: float) -> list[tuple[float, float]]:
    """At most two points per column of the plot: the least and the greatest value, in their order."""
    if len(points) <= 2 * _COLUMNS or until <= 0:
        return list(points)
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        columns.setdefault(int(point[0] / until * _COLUMNS), []).append(point)
    kept = []
    for column in sorted(columns):
        least = min(columns[column], key=lambda point: point[1])
        greatest = max(columns[column], key=lambda point: point[1])
        kept += sorted({least, greatest})
    return kept


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values that cover ``low`` to ``high``, with at most ``most`` steps between these two."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next((round_ for round_ in (1, 2, 5) if (high - low) / (step * round_) <= most), 10)
    first, last = math.floor(low / step), math.ceil(high / step)
    # Multiples, since sums of 0.1 are no round numbers.
    return [round(count * step, 12) for count in range(first, last + 1)]
