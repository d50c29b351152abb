"""A record of any kind as an HTML page: its figures as bars and rows, and its checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tunetool.node.common.files import replace_file
from tunetool.record import Measurement, Record
from tunetool.report.html import checks, render
from tunetool.view.plots import bar_of, bars
from tunetool.view.selection import label
from tunetool.view.text import format_value, interval_words, scale

_COLOUR = "#1f6feb"
_MOST_ROWS, _MOST_BARS = 400, 40


def write_page(record: Record, path: Path) -> Path | None:
    """Write the page to ``path`` by rename."""
    replace_file(str(path), page(record))
    return path


def page(record: Record) -> str:
    """The text of the page."""
    return render(
        "record.html.j2",
        record=record,
        plots=list(_plots(record)),
        rows=[_row(figure) for figure in record.measurements[:_MOST_ROWS]],
        more=max(0, len(record.measurements) - _MOST_ROWS),
        **checks(record),
    )


def _plots(record: Record) -> Iterator[str]:
    """A plot for each unit."""
    by_unit: dict[str, list[Measurement]] = {}
    for figure in record.measurements:
        by_unit.setdefault(figure.unit, []).append(figure)
    for unit, figures in by_unit.items():
        factor, shown = scale(unit, max(abs(figure.value) for figure in figures))
        drawn = [bar_of(label(figure), figure, _COLOUR, factor) for figure in figures[:_MOST_BARS]]
        yield bars(shown or "ratio", drawn)


def _row(figure: Measurement) -> Mapping[str, Any]:
    return {
        "name": label(figure),
        "number": figure.value,
        "value": format_value(figure.value, figure.unit),
        "interval": interval_words(figure),
        "medium": figure.medium,
        "engine": figure.engine,
    }
