"""The record of `bench offload` as an HTML page: bars of a step's parts and of the swap's speed, with whiskers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tunetool.node.common.files import replace_file
from tunetool.record import Record
from tunetool.report.html import checks, render
from tunetool.report.offload import Line, advice, lines, notes, tables
from tunetool.view.plots import bar_of, bars

_COLOURS = {
    "step": "#1f6feb",
    "compute": "#8c959f",
    "read": "#2da44e",
    "write": "#bf8700",
    "bandwidth": "#1f6feb",
    "rung": "#8c959f",
}


def write_page(record: Record, path: Path) -> Path | None:
    """Write the page to ``path`` by rename; returns None and writes nothing where the record has no figures."""
    known = lines(record)
    if not known:
        return None
    sections = [{"title": title, "heads": heads, "rows": rows} for title, heads, rows in tables(known)]
    page = render(
        "offload.html.j2",
        record=record,
        limits=advice(record, known),
        plots=list(_plots(known)),
        sections=sections,
        notes=list(notes(record, known)),
        **checks(record),
    )
    replace_file(str(path), page)
    return path


def _plots(known: Sequence[Line]) -> Iterator[str]:
    """A plot of the seconds of a step, and one for each direction of the swap."""
    parts = [
        bar_of(f"{line.name}: {name}", line.figures[name], _COLOURS[name])
        for line in known
        for name in ("step", "compute", "read", "write")
        if name in line.figures
    ]
    yield bars("a step and its parts, seconds", parts)
    for direction in ("read", "write"):
        drawn = [
            bar_of(f"{line.name}: {title}", line.figures[f"{direction}.{name}"], _COLOURS[name], 1e9)
            for line in known
            for name, title in (("bandwidth", "swap"), ("rung", "aio alone"))
            if f"{direction}.{name}" in line.figures
        ]
        if drawn:
            yield bars(f"{direction}s, GB/s", drawn)
