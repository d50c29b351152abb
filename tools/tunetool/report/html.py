"""What every HTML page shares: its templates, and bars with whiskers as SVG. No page has a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tunetool.record import Confidence, Measurement, Record
from tunetool.report.page import number

_TEMPLATES = Path(__file__).resolve().parents[1] / "templates/report"
_WIDTH, _LEFT, _RIGHT, _BAR, _GAP, _TOP = 760, 190, 70, 18, 8, 40
_LETTER = 6.6
"""Width of a letter at the size of a bar's name, or a little more."""


def render(template: str, **values: object) -> str:
    """The text of a page; ``template`` extends ``base.html.j2``, and all values are escaped unless marked safe."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, autoescape=True, keep_trailing_newline=True
    )
    return environment.get_template(template).render(**values)


@dataclass(frozen=True)
class Bar:
    """One bar with its interval, all in the plot's unit."""

    name: str
    value: float
    low: float
    high: float
    colour: str


def interval_of(figure: Measurement) -> Confidence | None:
    """Its interval; None where it has one sample. Records of earlier versions have that sample at both ends."""
    interval = figure.confidence
    return interval if interval is not None and interval.level != 0 else None


def has_reasons(record: Record) -> bool:
    """Whether a page without figures says something: why there are none."""
    return record.verdict is not None and record.verdict.status != "pass" and bool(record.verdict.reasons)


def bar_of(name: str, figure: Measurement, colour: str, unit: float = 1.0) -> Bar:
    """A measurement as a bar in units of ``unit``; without an interval its whisker has no length."""
    interval = interval_of(figure)
    low, high = (interval.low, interval.high) if interval else (figure.value, figure.value)
    return Bar(name, figure.value / unit, low / unit, high / unit, colour)


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Horizontal bars as SVG, from zero; a whisker spans the interval."""
    height = _TOP + len(rows) * (_BAR + _GAP)
    top = max((max(row.value, row.high) for row in rows), default=0.0) or 1.0
    left = max([_LEFT, *(round(_LETTER * len(row.name)) + 12 for row in rows)])
    scale = (_WIDTH - left - _RIGHT) / top
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="{escape(title)}">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="4" y="18" font-size="14">{escape(title)}</text>',
    ]
    for index, row in enumerate(rows):
        y = _TOP - 10 + index * (_BAR + _GAP)
        middle = y + _BAR / 2
        low, high = (left + max(0.0, edge) * scale for edge in (row.low, row.high))
        end = max(high, left + max(0.0, row.value) * scale)
        parts += [
            f'<text x="{left - 6}" y="{middle + 4:.1f}" text-anchor="end">{escape(row.name)}</text>',
            f'<rect x="{left}" y="{y}" width="{max(0.0, row.value) * scale:.1f}" height="{_BAR}" fill="{row.colour}"/>',
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}" stroke="#1f2328"/>',
            f'<text x="{end + 6:.1f}" y="{middle + 4:.1f}">{number(row.value)}</text>',
        ]
    return "\n".join([*parts, "</svg>"])
