"""Bars with whiskers as SVG, and what all plots share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from tunetool.record import Measurement
from tunetool.view.text import interval_of, number

_WIDTH, _LEFT, _RIGHT, _BAR, _GAP, _TOP = 760, 190, 70, 18, 8, 40
_LETTER = 6.6
"""Width of a letter at the size of a bar's name, or a little more."""
_LONGEST = 64
"""Characters of a bar's name; a longer one would leave no room for the bar."""


@dataclass(frozen=True)
class Bar:
    """One bar with its interval, all in the plot's unit."""

    name: str
    value: float
    low: float
    high: float
    colour: str


def bar_of(name: str, figure: Measurement, colour: str, unit: float = 1.0) -> Bar:
    """A measurement as a bar in units of ``unit``; without an interval its whisker has no length."""
    interval = interval_of(figure)
    low, high = (interval.low, interval.high) if interval else (figure.value, figure.value)
    return Bar(name, figure.value / unit, low / unit, high / unit, colour)


def picture(width: int, height: int, alternative: str, size: int = 12) -> list[str]:
    """The beginning of an SVG: its size, its paper, and the text for those who do not see it."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="{size}" role="img" '
        f"aria-label={quoteattr(alternative)}>",
        f'<rect class="paper" width="{width}" height="{height}" fill="white"/>',
    ]


def shortened(text: str, most: int) -> str:
    """At most that many characters, the end of a longer text left out."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Horizontal bars as SVG, from zero; a whisker spans the interval."""
    height = _TOP + len(rows) * (_BAR + _GAP)
    top = max((max(row.value, row.high) for row in rows), default=0.0) or 1.0
    left = max([_LEFT, *(round(_LETTER * len(shortened(row.name, _LONGEST))) + 12 for row in rows)])
    scale = (_WIDTH - left - _RIGHT) / top
    parts = [
        *picture(_WIDTH, height, f"{title}: {'; '.join(map(_words, rows))}"),
        f'<text x="4" y="18" font-size="14">{escape(title)}</text>',
    ]
    for index, row in enumerate(rows):
        y = _TOP - 10 + index * (_BAR + _GAP)
        middle = y + _BAR / 2
        low, high = (left + max(0.0, edge) * scale for edge in (row.low, row.high))
        end = max(high, left + max(0.0, row.value) * scale)
        parts += [
            f'<text x="{left - 6}" y="{middle + 4:.1f}" text-anchor="end">'
            f"{escape(shortened(row.name, _LONGEST))}</text>",
            f'<rect x="{left}" y="{y}" width="{max(0.0, row.value) * scale:.1f}" height="{_BAR}" fill="{row.colour}"/>',
            f'<line class="whisker" x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}" '
            'stroke="#1f2328"/>',
            f'<text x="{end + 6:.1f}" y="{middle + 4:.1f}">{number(row.value)}</text>',
        ]
    return "\n".join([*parts, "</svg>"])


def _words(row: Bar) -> str:
    spread = f" ({number(row.low)} to {number(row.high)})" if row.high > row.low else ""
    return f"{row.name} {number(row.value)}{spread}"
