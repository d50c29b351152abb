"""The ladder as a picture: a bar for each rung from the drives up, the ceiling, and the rung that loses. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from tunetool.record import Rung
from tunetool.view.plots import picture, shortened
from tunetool.view.text import number

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _BAR = 760, 200, 180, 44, 26, 16
_KEPT, _LOST, _CEILING = "#1f6feb", "#cf222e", "#8c6d1f"
_LONGEST = 30
"""Characters of a rung's title."""
_FAR = 2.0
"""A ceiling that is further above the fastest rung would make all bars short: it is written, not drawn."""


def ladder(rungs: Sequence[Rung], ceiling: float | None) -> str:
    """The picture of the rungs in their order; values in bytes per second."""
    values = {rung.title: rung.value for rung in rungs if rung.value is not None}
    top = max(values.values(), default=0.0) or 1.0
    drawn_ceiling = ceiling if ceiling is not None and ceiling <= _FAR * top else None
    top = max(top, drawn_ceiling or 0.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / top
    height = _TOP + len(rungs) * _ROW + 8
    bottom = height - 8
    parts = picture(_WIDTH, height, _words(rungs, ceiling))
    parts.append('<text x="4" y="16" font-size="14">GB/s, from the drives up</text>')
    if ceiling is not None:
        x = _LEFT + min(ceiling, top) * scale
        shown = f"ceiling of the links {number(ceiling / 1e9)}"
        if drawn_ceiling is not None:
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{bottom}" stroke="{_CEILING}" '
                'stroke-width="1.5" stroke-dasharray="5 3"/>'
            )
        parts.append(f'<text x="{x:.1f}" y="{_TOP - 14}" text-anchor="middle">{shown}</text>')
    for index, rung in enumerate(rungs):
        parts += _row(rung, _TOP + index * _ROW, scale, values)
    return "\n".join([*parts, "</svg>"])


def _row(rung: Rung, y: float, scale: float, values: dict[str, float]) -> list[str]:
    base = y + _BAR - 3.5
    title = escape(shortened(rung.title, _LONGEST))
    if rung.value is None:
        return [
            f'<text class="quiet" x="{_LEFT - 8}" y="{base:.1f}" text-anchor="end">{title}</text>',
            f'<text class="quiet" x="{_LEFT + 6}" y="{base:.1f}">skipped</text>',
        ]
    style = ' class="lost"' if rung.loses else ""
    width = rung.value * scale
    parts = [
        f'<text{style} x="{_LEFT - 8}" y="{base:.1f}" text-anchor="end">{title}</text>',
        f'<rect x="{_LEFT}" y="{y:.1f}" width="{width:.1f}" height="{_BAR}" fill="{_LOST if rung.loses else _KEPT}"/>',
    ]
    end = width
    below = values.get(rung.below or "")
    if rung.least is not None and below is not None:
        # What this rung is expected to keep of the one below.
        mark = _LEFT + min(rung.least * below * scale, _WIDTH - _LEFT - _RIGHT)
        parts.append(
            f'<line class="whisker" x1="{mark:.1f}" x2="{mark:.1f}" y1="{y - 2:.1f}" y2="{y + _BAR + 2:.1f}" '
            'stroke="#1f2328" stroke-width="2"/>'
        )
        end = max(end, mark - _LEFT)
    parts.append(f'<text{style} x="{_LEFT + end + 6:.1f}" y="{base:.1f}">{escape(_said(rung))}</text>')
    return parts


def _said(rung: Rung) -> str:
    shown = number((rung.value or 0.0) / 1e9)
    if rung.share is None:
        return shown
    least = f", {rung.least:.0%} wanted" if rung.loses and rung.least is not None else ""
    return f"{shown}  keeps {rung.share:.0%}{least}"


def _words(rungs: Sequence[Rung], ceiling: float | None) -> str:
    """The picture for those who do not see it."""
    said = [f"{rung.title} {'skipped' if rung.value is None else _said(rung)}" for rung in rungs]
    lost = [rung.title for rung in rungs if rung.loses]
    head = f"ceiling {number(ceiling / 1e9)}; " if ceiling is not None else ""
    end = f"; loses: {', '.join(lost)}" if lost else "; no rung loses"
    return f"The ladder, GB/s: {head}{'; '.join(said)}{end}"
