"""The record of `bench strategies` as a page: steps measured beside steps predicted. No script."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tunetool.node.common.files import replace_file
from tunetool.node.units import format_size
from tunetool.record import Measurement, Record
from tunetool.report.checkpoint_page import TEMPLATES, Bar, bars
from tunetool.report.page import number
from tunetool.report.strategies import Ran, advice, cells, networks

_MEASURED, _PREDICTED, _START = "#1f6feb", "#8c959f", "#2da44e"


def write_page(record: Record, path: Path) -> Path | None:
    """Write it whole or not at all; None where the record has no figures."""
    if not cells(record):
        return None
    replace_file(str(path), page(record))
    return path


def page(record: Record) -> str:
    """The page's text."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, autoescape=True, keep_trailing_newline=True
    )
    ran = cells(record)
    plots = [
        bars("a step, s: measured (whiskers: range of the rounds) and predicted", _steps(ran)),
        bars("start, s: processes, imports, communicator, model, engine", _starts(ran)),
    ]
    rates = [
        Bar(f"{layout} {kind}".replace("_", "-"), each.value / 1e9, each.value / 1e9, each.value / 1e9, _MEASURED)
        for layout, figures in networks(record).items()
        for kind in ("all_reduce", "all_gather", "reduce_scatter")
        if (each := figures.get(f"{kind}.bus_bandwidth")) is not None
    ]
    if rates:
        plots.append(bars("bus bandwidth, GB/s", rates))
    return environment.get_template("strategies.html.j2").render(
        record=record,
        advice=advice(record),
        plots=plots,
        rows=[_row(each) for each in ran],
        left_out=[f"{check.id}: {check.found}" for check in record.checks if check.status != "pass"],
    )


def _steps(ran: list[Ran]) -> list[Bar]:
    found = []
    for each in ran:
        found.append(_bar(each.name, each.step, _MEASURED))
        predicted = each.told.get("predicted_seconds")
        if predicted is not None:
            value = float(predicted)
            found.append(Bar(f"{each.name} predicted", value, value, value, _PREDICTED))
    return found


def _starts(ran: list[Ran]) -> list[Bar]:
    return [_bar(each.name, each.figures["start"], _START) for each in ran if "start" in each.figures]


def _bar(name: str, figure: Measurement, colour: str) -> Bar:
    interval = figure.confidence
    low, high = (interval.low, interval.high) if interval else (figure.value, figure.value)
    return Bar(name, figure.value, low, high, colour)


def _row(each: Ran) -> dict[str, str]:
    def shown(name: str) -> str:
        figure = each.figures.get(name)
        return number(figure.value) if figure is not None else "-"

    predicted = each.told.get("predicted_seconds")
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
