"""What is shown of a record of any kind: all its figures, as bars for each unit and as rows, and its checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tunetool.record import Measurement, Record
from tunetool.view.model import Block, Cell, Cells, Notes, Plot, Section, Table, View
from tunetool.view.plots import bar_of, bars
from tunetool.view.selection import label
from tunetool.view.text import format_value, interval_words, scale

_COLOUR = "#1f6feb"
_MOST_ROWS, _MOST_BARS = 400, 40
_TITLES = ("figure", "median", "interval", "medium", "program")


def view(record: Record, _: Path | None = None) -> View:
    """What is shown."""
    return View(f"{record.kind} on {record.node.host}", sections=figures(record), checks=True)


def figures(record: Record) -> list[Section]:
    """The section of all figures on a page, where there is any."""
    return [Section("Figures", list(_blocks(record)), on="page")] if record.measurements else []


def has_reasons(record: Record) -> bool:
    """Whether a page without figures says something: why there are none."""
    return record.verdict is not None and record.verdict.status != "pass" and bool(record.verdict.reasons)


def _blocks(record: Record) -> Iterator[Block]:
    by_unit: dict[str, list[Measurement]] = {}
    for figure in record.measurements:
        by_unit.setdefault(figure.unit, []).append(figure)
    for unit, known in by_unit.items():
        factor, shown = scale(unit, max(abs(figure.value) for figure in known))
        drawn = [bar_of(label(figure), figure, _COLOUR, factor) for figure in known[:_MOST_BARS]]
        yield Plot(bars(shown or "ratio", drawn))
    yield Table(_TITLES, [_row(figure) for figure in record.measurements[:_MOST_ROWS]], ("median",))
    if (more := len(record.measurements) - _MOST_ROWS) > 0:
        yield Notes([f"{more} more are in the record."])


def _row(figure: Measurement) -> Cells:
    value = Cell(format_value(figure.value, figure.unit), number=figure.value)
    return [label(figure), value, interval_words(figure), figure.medium, figure.engine]
