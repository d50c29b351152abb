"""The record of `bench checkpoint` as a page with plots: bars for each engine, whiskers for the interval. No script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tunetool.node.common.files import replace_file
from tunetool.record import Measurement, Record
from tunetool.report.checkpoint import Engine, Medium, advice, media
from tunetool.report.page import number

TEMPLATES = Path(__file__).resolve().parents[1] / "templates/report"
_WIDTH, _LEFT, _RIGHT, _BAR, _GAP, _TOP = 760, 190, 70, 18, 8, 40
_DIRECT, _OTHER, _FIO = "#1f6feb", "#8c959f", "#2da44e"


@dataclass(frozen=True)
class Bar:
    """One engine's bar."""

    name: str
    value: float
    low: float
    high: float
    colour: str


def write_page(record: Record, path: Path) -> Path | None:
    """Write it whole or not at all; None where the record has no figures."""
    found = media(record)
    if not any(medium.measured for medium in found):
        return None
    replace_file(str(path), page(record, found))
    return path


def page(record: Record, found: Sequence[Medium]) -> str:
    """The page's text."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, autoescape=True, keep_trailing_newline=True
    )
    return environment.get_template("checkpoint.html.j2").render(
        record=record, media=[_section(medium) for medium in found if medium.measured]
    )


def _section(medium: Medium) -> Mapping[str, Any]:
    stalls = [bar for engine in medium.measured if (bar := _bar(engine.name, engine.figures.get("stall"), engine, 1))]
    plots = [
        bars(f"{medium.name}: durable, GB/s", _rates(medium, "durable", "write")),
        bars(f"{medium.name}: restored from a cold cache, GB/s", _rates(medium, "restore", "read")),
        bars(f"{medium.name}: the training loop is held, s", stalls),
    ]
    lost = [bar for each in medium.trained if (bar := _bar(each.name, each.figures.get("lost_time"), each, 1))]
    if lost:
        plots.append(bars(f"{medium.name}: time lost per checkpoint in training, s", lost))
    return {
        "name": medium.name,
        "memory": medium.memory,
        "advice": advice(medium),
        "plots": plots,
        "rows": [_row(engine) for engine in medium.measured],
        "left_out": [f"{check.id.rpartition('.')[2]}: {check.found}" for check in medium.left_out],
    }


def _row(engine: Engine) -> Mapping[str, Any]:
    def shown(figure: str, unit: float) -> str:
        value = engine.value(figure)
        return "-" if value is None else number(value / unit)

    return {
        "name": engine.name,
        "stall": shown("stall", 1),
        "durable": shown("durable", 1e9),
        "restore": shown("restore", 1e9),
        "cpu": shown("cpu", 1),
        "memory": shown("peak_memory", 1e9),
        "equal": engine.equal,
    }


def _rates(medium: Medium, figure: str, direction: str) -> list[Bar]:
    found = []
    fio = medium.fio.get(direction)
    if fio is not None:
        found.append(_bar("best of fio", fio, None, 1e9))
    found += [_bar(engine.name, engine.figures.get(figure), engine, 1e9) for engine in medium.measured]
    return [bar for bar in found if bar is not None]


def _bar(name: str, figure: Measurement | None, engine: Engine | None, unit: float) -> Bar | None:
    if figure is None:
        return None
    interval = figure.confidence
    low, high = (interval.low, interval.high) if interval else (figure.value, figure.value)
    colour = _FIO if engine is None else _DIRECT if engine.family.startswith("direct") else _OTHER
    return Bar(name, figure.value / unit, low / unit, high / unit, colour)


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Horizontal bars as SVG, from zero; a whisker spans the interval."""
    height = _TOP + len(rows) * (_BAR + _GAP)
    top = max((max(row.value, row.high) for row in rows), default=0.0) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / top
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="{escape(title)}">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="4" y="18" font-size="14">{escape(title)}</text>',
    ]
    for place, row in enumerate(rows):
        y = _TOP - 10 + place * (_BAR + _GAP)
        middle = y + _BAR / 2
        low, high = (_LEFT + max(0.0, edge) * scale for edge in (row.low, row.high))
        end = max(high, _LEFT + max(0.0, row.value) * scale)
        parts += [
            f'<text x="{_LEFT - 6}" y="{middle + 4:.1f}" text-anchor="end">{escape(row.name)}</text>',
            f'<rect x="{_LEFT}" y="{y}" width="{max(0.0, row.value) * scale:.1f}" height="{_BAR}" '
            f'fill="{row.colour}"/>',
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}" stroke="#1f2328"/>',
            f'<text x="{end + 6:.1f}" y="{middle + 4:.1f}">{number(row.value)}</text>',
        ]
    return "\n".join([*parts, "</svg>"])
