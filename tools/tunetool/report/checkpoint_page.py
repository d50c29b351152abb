"""The record of `bench checkpoint` as an HTML page: bars for each engine, with whiskers for the interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunetool.node.common.files import replace_file
from tunetool.record import Measurement, Record
from tunetool.report.checkpoint import Engine, Medium, advice, media
from tunetool.report.html import render
from tunetool.view.plots import Bar, bar_of, bars
from tunetool.view.text import number

_DIRECT, _OTHER, _FIO = "#1f6feb", "#8c959f", "#2da44e"


def write_page(record: Record, path: Path) -> Path | None:
    """Write the page to ``path`` by rename; returns None and writes nothing where the record has no figures."""
    sections = media(record)
    if not any(medium.measured for medium in sections):
        return None
    replace_file(str(path), page(record, sections))
    return path


def page(record: Record, sections: Sequence[Medium]) -> str:
    """The text of the page."""
    measured = [medium for medium in sections if medium.measured]
    return render(
        "checkpoint.html.j2",
        record=record,
        limits=[line for medium in measured for line in advice(medium)],
        media=[_section(medium) for medium in measured],
    )


def _section(medium: Medium) -> Mapping[str, Any]:
    stalls = [bar for engine in medium.measured if (bar := _bar(engine.name, engine.figures.get("stall"), engine, 1))]
    plots = [
        bars(f"{medium.name}: durable, GB/s", _rates(medium, "durable", "write")),
        bars(f"{medium.name}: restored from a cold cache, GB/s", _rates(medium, "restore", "read")),
        bars(f"{medium.name}: stall of the training loop, s", stalls),
    ]
    lost = [bar for each in medium.trained if (bar := _bar(each.name, each.figures.get("lost_time"), each, 1))]
    if lost:
        plots.append(bars(f"{medium.name}: time lost per checkpoint in training, s", lost))
    return {
        "name": medium.name,
        "memory": medium.memory,
        "plots": plots,
        "rows": [_row(engine) for engine in medium.measured],
        "left_out": [f"{check.labels['engine']}: {check.found}" for check in medium.left_out],
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
        "equal": engine.is_equal,
    }


def _rates(medium: Medium, figure: str, direction: str) -> list[Bar]:
    rates = []
    fio = medium.fio.get(direction)
    if fio is not None:
        rates.append(_bar("best of fio", fio, None, 1e9))
    rates += [_bar(engine.name, engine.figures.get(figure), engine, 1e9) for engine in medium.measured]
    return [bar for bar in rates if bar is not None]


def _bar(name: str, figure: Measurement | None, engine: Engine | None, unit: float) -> Bar | None:
    if figure is None:
        return None
    colour = _FIO if engine is None else _DIRECT if engine.family.startswith("direct") else _OTHER
    return bar_of(name, figure, colour, unit)
