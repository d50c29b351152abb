"""Tables as CSV and as Markdown: the figures of a record, a comparison, a trend. Pure."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Literal

from tunetool.record import Measurement, Record
from tunetool.report.lines import without_commands

Cell = str | float | int | None
Form = Literal["text", "csv", "markdown"]

_FIGURES = (
    *("name", "figure", "value", "low", "high", "unit", "samples", "medium", "program"),
    *("rank", "host", "expected", "result"),
)
"""After them a column for each label that a figure of the record has."""
_FORMULA = re.compile(r"[=+@\t\r-]")
"""What a spreadsheet takes for the beginning of a formula."""


def csv_text(titles: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """The table as CSV (RFC 4180), numbers in full; a text that a spreadsheet would compute gets a leading quote."""
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow(titles)
    for row in rows:
        writer.writerow([_spelled(cell) for cell in row])
    return stream.getvalue()


def _spelled(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, str):
        return f"'{cell}" if _FORMULA.match(cell) else cell
    return repr(cell)


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """The table in GitHub's Markdown; nothing in a title or a cell is markup."""
    lines = [[plain(each) for each in titles], ["---"] * len(titles), *([_shown(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _shown(cell: Cell) -> str:
    if cell is None:
        return ""
    return plain(cell) if isinstance(cell, str) else f"{cell:.5g}"


def plain(text: str) -> str:
    """A text on one line of Markdown, without markup and HTML."""
    escaped = re.sub(r"([\\`*_\[\]|~])", r"\\\1", " ".join(without_commands(text).split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def record_csv(record: Record) -> str:
    """A row for each figure of a record."""
    return csv_text(*_table(record))


def open_checks(record: Record) -> str:
    """The checks that fail or are not known, as a table; empty where there is none."""
    rows = [
        (check.status, check.id, check.found, check.expected, check.remedy)
        for check in record.checks
        if check.status in ("fail", "unknown")
    ]
    return markdown_table(("status", "check", "found", "expected", "remedy"), rows) if rows else ""


def _table(record: Record) -> tuple[list[str], list[list[Cell]]]:
    labels = list(dict.fromkeys(key for each in record.measurements for key in each.labels))
    rows = [
        [*row, *(each.labels.get(key) for key in labels)]
        for row, each in zip(_rows(record), record.measurements, strict=True)
    ]
    return [*_FIGURES, *labels], rows


def _rows(record: Record) -> list[tuple[Cell, ...]]:
    wanted = {expectation.name: expectation for expectation in record.expectations}
    rows = []
    for figure in record.measurements:
        low, high = interval(figure)
        expectation = wanted.get(figure.name)
        rows.append(
            (
                *(figure.name, figure.figure, figure.value, low, high, figure.unit, len(figure.samples or [])),
                *(figure.medium, figure.engine, figure.rank, figure.host),
                *((expectation.value, expectation.status) if expectation else (None, None)),
            )
        )
    return rows


def interval(figure: Measurement) -> tuple[float | None, float | None]:
    """The ends of its interval."""
    return (figure.confidence.low, figure.confidence.high) if figure.confidence else (None, None)
