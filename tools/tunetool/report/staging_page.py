"""The record of `bench staging` as a page with plots: both paths' bars side by side. No script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tunetool.bench.staging.published import TITLES
from tunetool.node.common.files import replace_file
from tunetool.record import Record
from tunetool.report.checkpoint_page import TEMPLATES, Bar, bars
from tunetool.report.staging import Found, closing, head, notes, rows, scenarios, summary

_MEMORY, _BULK = "#1f6feb", "#8c959f"
_PLOTS: Mapping[str, str] = {
    "model_load": "model load, s",
    "data_per_batch": "data load of a batch, s",
    "first_epoch": "first epoch, s",
    "end_to_end": "end to end, staging included, s",
}


def write_page(record: Record, path: Path) -> Path | None:
    """Write it whole or not at all; None where the record has no figures."""
    found = [each for each in scenarios(record) if each.any is not None]
    if not found:
        return None
    replace_file(str(path), page(record, found))
    return path


def page(record: Record, found: Sequence[Found]) -> str:
    """The page's text."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, autoescape=True, keep_trailing_newline=True
    )
    return environment.get_template("staging.html.j2").render(
        record=record,
        sections=[_section(each) for each in found],
        summary=list(summary(found)),
        closing=list(closing(found)),
    )


def _section(found: Found) -> Mapping[str, Any]:
    return {
        "title": TITLES[found.name],
        "head": list(head(found)),
        "rows": list(rows(found)),
        "notes": list(notes(found)),
        "plots": [bars(f"{TITLES[found.name]}: {title}", _bars(found, figure)) for figure, title in _PLOTS.items()],
    }


def _bars(found: Found, figure: str) -> list[Bar]:
    drawn = []
    for path, colour in (("memory", _MEMORY), ("bulk", _BULK)):
        measured = found.figures.get((path, figure))
        if measured is not None:
            interval = measured.confidence
            low, high = (interval.low, interval.high) if interval else (measured.value, measured.value)
            drawn.append(Bar(f"{path} ({measured.medium})", measured.value, low, high, colour))
    return drawn
