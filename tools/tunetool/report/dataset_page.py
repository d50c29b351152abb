"""The record of `bench dataset` as an HTML page: bars of samples per second in each state, with whiskers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunetool.bench.dataset.engines import is_of_images
from tunetool.bench.dataset.figures import RATE, READ
from tunetool.node.common.files import replace_file
from tunetool.record import Record
from tunetool.report.dataset import HEADS, StateSection, advice, cells, notes, state_sections
from tunetool.report.html import render
from tunetool.view.plots import bar_of, bars

_PLAIN, _SPECIAL = "#8c959f", "#1f6feb"
_PLOTS = (("tokens", READ, "GB/s", 1e9), ("images", RATE, "images/s", 1.0))


def write_page(record: Record, path: Path) -> Path | None:
    """Write the page to ``path`` by rename; returns None and writes nothing where the record has no figures."""
    sections = state_sections(record)
    shown = [_section(section) for section in sections if section.measured]
    if not shown:
        return None
    page = render("dataset.html.j2", record=record, limits=[advice(sections)], sections=shown, heads=HEADS)
    replace_file(str(path), page)
    return path


def _section(section: StateSection) -> Mapping[str, Any]:
    plots = []
    for kind, figure, unit, size in _PLOTS:
        engines = [engine for engine in section.measured if is_of_images(engine.name) == (kind == "images")]
        drawn = [
            bar_of(
                engine.name,
                engine.figures[figure],
                _PLAIN if engine.name.startswith(("mmap", "files")) else _SPECIAL,
                size,
            )
            for engine in engines
        ]
        if drawn:
            plots.append(bars(f"{section.title}: {kind}, {unit}", drawn))
    return {
        "title": section.title,
        "notes": list(notes(section)),
        "plots": plots,
        "rows": [cells(engine) for engine in section.measured],
    }
