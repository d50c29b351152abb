"""The record of `bench strategies` as an HTML page: measured and predicted steps side by side."""

from __future__ import annotations

from pathlib import Path

from tunetool.bench.strategies.predict import LEFT_OUT
from tunetool.node.common.files import replace_file
from tunetool.node.units import format_size
from tunetool.record import Record
from tunetool.report.html import render
from tunetool.report.strategies import (
    PUBLISHED_TITLES,
    Cell,
    advice,
    cells,
    networks,
    published_notes,
    published_rows,
)
from tunetool.view.figures import has_reasons
from tunetool.view.plots import Bar, bar_of, bars
from tunetool.view.text import number

_MEASURED, _PREDICTED, _START = "#1f6feb", "#8c959f", "#2da44e"


def write_page(record: Record, path: Path) -> Path | None:
    """Write the page to ``path`` by rename; returns None and writes nothing where it has nothing to say."""
    if not cells(record) and not has_reasons(record):
        return None
    replace_file(str(path), page(record))
    return path


def page(record: Record) -> str:
    """The text of the page."""
    ran = cells(record)
    plots = []
    if ran:
        plots.append(bars("step, s: measured (whiskers: range of the rounds) and predicted", _steps(ran)))
        plots.append(bars("start, s: processes, imports, communicator, model, engine", _starts(ran)))
    rates = [
        Bar(f"{layout} {kind}".replace("_", "-"), each.value / 1e9, each.value / 1e9, each.value / 1e9, _MEASURED)
        for layout, figures in networks(record).items()
        for kind in ("all_reduce", "all_gather", "reduce_scatter")
        if (each := figures.get(f"{kind}.bus_bandwidth")) is not None
    ]
    if rates:
        plots.append(bars("bus bandwidth, GB/s", rates))
    return render(
        "strategies.html.j2",
        record=record,
        limits=advice(record),
        plots=plots,
        rows=[_row(each) for each in ran],
        published_titles=PUBLISHED_TITLES,
        published=list(published_rows(ran)) if ran else [],
        notes=[f"no prediction has: {LEFT_OUT}", *published_notes(ran)] if ran else [],
        left_out=[f"{check.id}: {check.found}" for check in record.checks if check.status != "pass"],
    )


def _steps(ran: list[Cell]) -> list[Bar]:
    bars = []
    for each in ran:
        bars.append(bar_of(each.name, each.step, _MEASURED))
        predicted = each.parameters.get("predicted_seconds")
        if predicted is not None:
            value = float(predicted)
            bars.append(Bar(f"{each.name} predicted", value, value, value, _PREDICTED))
    return bars


def _starts(ran: list[Cell]) -> list[Bar]:
    return [bar_of(each.name, each.figures["start"], _START) for each in ran if "start" in each.figures]


def _row(each: Cell) -> dict[str, str]:
    def shown(name: str) -> str:
        figure = each.figures.get(name)
        return number(figure.value) if figure is not None else "-"

    predicted = each.parameters.get("predicted_seconds")
    return {
        "name": each.name,
        "step": number(each.step.value),
        "predicted": number(float(predicted)) if predicted is not None else "-",
        "error": f"{each.number('prediction_error'):+.0%}" if predicted is not None else "-",
        "sent": format_size(round(each.number("sent_bytes"))),
        "alone": shown("versus_alone"),
        "zero2": shown("versus_zero2"),
        "efficiency": shown("efficiency"),
        "start": shown("start"),
        "states": format_size(round(each.number("state_bytes"))),
    }
