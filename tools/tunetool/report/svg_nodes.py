"""One figure of many nodes as a picture: a dot for each, the slowest on the left, and the median. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from xml.sax.saxutils import escape

from tunetool.report.html import picture
from tunetool.report.page import number
from tunetool.report.svg_curves import mark_line, ticks

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 190, 56, 14, 30, 26
_GOOD, _BAD = "#1f6feb", "#cf222e"
_NAMED = 5


@dataclass(frozen=True)
class Dot:
    """One node's figure; a node that is bad in any way has another colour and a larger dot."""

    name: str
    value: float
    bad: bool


def dots(title: str, given: Sequence[Dot]) -> str:
    """The picture; ``given`` is not empty, and its values are in the unit of ``title``."""
    ordered = sorted(given, key=lambda dot: (dot.value, dot.name))
    middle = median(dot.value for dot in ordered)
    marks = ticks(0.0, max(dot.value for dot in ordered) or 1.0, 4)
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def down(value: float) -> float:
        return _TOP + (1 - value / marks[-1]) * height

    bad = [dot for dot in ordered if dot.bad]
    named = "; ".join(f"{dot.name} {number(dot.value)}" for dot in ordered[:_NAMED])
    said = f"{title}: {len(ordered)} nodes, median {number(middle)}, the slowest: {named}; {len(bad)} marked"
    parts = [*picture(_WIDTH, _HEIGHT, said, size=11), f'<text x="4" y="16" font-size="13">{escape(title)}</text>']
    for mark in marks:
        parts += mark_line(mark, down(mark), _LEFT, _WIDTH - _RIGHT)
    y = down(middle)
    parts.append(
        f'<line class="whisker" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#1f2328" '
        'stroke-dasharray="4 3"/>'
    )
    below = f"the slowest node first; dashed: median {number(middle)}"
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 8}" text-anchor="end">{below}</text>')
    step = width / max(len(ordered), 1)
    for index, dot in enumerate(ordered):
        colour, radius = (_BAD, 4) if dot.bad else (_GOOD, 2.5)
        parts.append(
            f'<circle cx="{_LEFT + (index + 0.5) * step:.1f}" cy="{down(dot.value):.1f}" r="{radius}" fill="{colour}">'
            f"<title>{escape(dot.name)} {number(dot.value)}</title></circle>"
        )
    return "\n".join([*parts, "</svg>"])
