"""The record of `bench loading` as an HTML page: bars for each engine, with whiskers for the interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunetool.bench.loading.engines import DIRECT
from tunetool.node.common.files import replace_file
from tunetool.record import Record
from tunetool.report.html import Bar, bar_of, bars, render
from tunetool.report.loading import Section, advice, ceiling, cells, notes, sections

_DIRECT, _OTHER, _CEILING = "#1f6feb", "#8c959f", "#2da44e"


def write_page(record: Record, path: Path) -> Path | None:
    """Write the page to ``path`` by rename; returns None and writes nothing where the record has no figures."""
    measured = [section for section in sections(record) if section.measured]
    if not measured:
        return None
    limits = [line for section in measured for line in advice(section)]
    shown = [_section(section) for section in measured]
    replace_file(str(path), render("loading.html.j2", record=record, limits=limits, sections=shown))
    return path


def _section(section: Section) -> Mapping[str, Any]:
    return {
        "title": section.title,
        "notes": list(notes(section)),
        "plots": [
            bars(f"{section.title}: {title}, GB/s", drawn)
            for which, title in (("first", "first load of a process"), ("warm", "the next load"))
            if (drawn := _bars(section, which))
        ],
        "ceiling": ceiling(section),
        "rows": [[cell.plain for cell in cells(section, engine)] for engine in section.measured],
    }


def _bars(section: Section, which: str) -> Sequence[Bar]:
    drawn = [
        bar_of(engine.name, engine.figures[which], _DIRECT if engine.name == DIRECT else _OTHER, 1e9)
        for engine in section.measured
        if which in engine.figures
    ]
    ceilings = (("copies from pinned memory", section.pinned), ("fio's read", section.fio))
    if drawn:
        drawn[:0] = [bar_of(name, figure, _CEILING, 1e9) for name, figure in ceilings if figure is not None]
    return drawn
