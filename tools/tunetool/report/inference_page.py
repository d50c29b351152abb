"""The record of `bench inference` as an HTML page: bars of tokens per second, the table, and the published figures."""

from __future__ import annotations

from pathlib import Path

from tunetool.bench.inference import published
from tunetool.node.common.files import replace_file
from tunetool.record import Record
from tunetool.report.html import render
from tunetool.report.inference import (
    HEADS,
    PUBLISHED_HEADS,
    advice,
    left_out,
    lines,
    notes,
    published_rows,
)
from tunetool.view.plots import bar_of, bars

_COLOURS = {"nvme": "#1f6feb"}
_PLAIN = "#8c959f"


def write_page(record: Record, path: Path) -> Path | None:
    """Write the page to ``path`` by rename; returns None and writes nothing where the record has no figures."""
    known = lines(record)
    if not known:
        return None
    drawn = [bar_of(line.key, line.tokens, _COLOURS.get(line.key, _PLAIN), 1.0) for line in known]
    page = render(
        "inference.html.j2",
        record=record,
        limits=advice(known),
        plots=[bars("tokens/s", drawn)],
        heads=HEADS,
        rows=[(line.title, *line.cells()) for line in known],
        notes=[*notes(known), *left_out(record)],
        published_heads=PUBLISHED_HEADS,
        published_rows=list(published_rows()),
        published_notes=published.remarks(),
    )
    replace_file(str(path), page)
    return path
