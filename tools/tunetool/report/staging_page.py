"""The record of `bench staging` as an HTML page with the bars of both paths side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunetool.bench.staging.published import TITLES
from tunetool.node.common.files import replace_file
from tunetool.record import Record
from tunetool.report.html import render
from tunetool.report.staging import MeasuredScenario, closing, head, notes, rows, scenarios, summary
from tunetool.view.figures import has_reasons
from tunetool.view.plots import Bar, bar_of, bars

_MEMORY, _BULK = "#1f6feb", "#8c959f"
_PLOTS: Mapping[str, str] = {
    "model_load": "model load, s",
    "data_per_batch": "data load of a batch, s",
    "first_epoch": "first epoch, s",
    "end_to_end": "end to end, staging included, s",
}


def write_page(record: Record, path: Path) -> Path | None:
    """Write the page to ``path`` by rename; returns None and writes nothing where it has nothing to say."""
    measured = [each for each in scenarios(record) if each.any is not None]
    if not measured and not has_reasons(record):
        return None
    replace_file(str(path), page(record, measured))
    return path


def page(record: Record, measured: Sequence[MeasuredScenario]) -> str:
    """The text of the page."""
    return render(
        "staging.html.j2",
        record=record,
        sections=[_section(scenario) for scenario in measured],
        summary=list(summary(measured)),
        closing=list(closing(measured)),
    )


def _section(scenario: MeasuredScenario) -> Mapping[str, Any]:
    return {
        "title": TITLES[scenario.name],
        "head": list(head(scenario)),
        "rows": list(rows(scenario)),
        "notes": list(notes(scenario)),
        "plots": [
            bars(f"{TITLES[scenario.name]}: {title}", _bars(scenario, figure)) for figure, title in _PLOTS.items()
        ],
    }


def _bars(scenario: MeasuredScenario, figure: str) -> list[Bar]:
    drawn = []
    for path, colour in (("memory", _MEMORY), ("bulk", _BULK)):
        measurement = scenario.figures.get((path, figure))
        if measurement is not None:
            drawn.append(bar_of(f"{path} ({measurement.medium})", measurement, colour))
    return drawn
