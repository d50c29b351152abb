"""The record of `bench drives` as an HTML page: bandwidth over the number of drives, a plot for each direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunetool.bench.drives.published import ROWS
from tunetool.node.common.files import replace_file
from tunetool.record import Record
from tunetool.report.drives import Curve, advice, counts_of, curves, figures_of_page, heads, notes
from tunetool.report.html import render
from tunetool.view.curves import Line, legend_of, plot
from tunetool.view.figures import has_reasons
from tunetool.view.text import interval_words


def write_page(record: Record, path: Path) -> Path | None:
    """Write the page to ``path`` by rename; returns None and writes nothing where the record has nothing to show."""
    known = curves(record)
    if not known and not has_reasons(record):
        return None
    sections = [_section(direction, rows, known) for direction, rows in figures_of_page(known).items()]
    page = render(
        "drives.html.j2",
        record=record,
        limits=advice(known),
        sections=sections,
        heads=[(head, True) for head in heads(known)],
        notes=list(notes(record, known)),
        published=[(False, (row.drives, f"{row.read:g}", f"{row.write:g}")) for row in ROWS] if known else [],
    )
    replace_file(str(path), page)
    return path


def _section(direction: str, rows: Sequence[Curve], known: Sequence[Curve]) -> Mapping[str, Any]:
    counts = counts_of(known)
    lines = [
        Line(curve.title, [(float(count), curve.bandwidths[count].value) for count in sorted(curve.bandwidths)])
        for curve in rows
    ]
    return {
        "title": f"{direction}s",
        "plot": plot(f"{direction}s by number of drives", "B/s", lines, float(max(counts)), "drives", max(counts)),
        "rows": [(False, (curve.title, *_cells(curve, counts))) for curve in rows],
        "legend": legend_of([line.name for line in lines]),
    }


def _cells(curve: Curve, counts: Sequence[int]) -> list[str]:
    """As in the table, with intervals."""
    *speeds, share = curve.cells(counts)
    spreads = [interval_words(curve.bandwidths[count]) if count in curve.bandwidths else "-" for count in counts]
    shown = [speed if spread == "-" else f"{speed} ({spread})" for speed, spread in zip(speeds, spreads, strict=True)]
    return [*shown, share]
