"""The record of `verify` of one node as an HTML page: the ladder as a picture, the drives side by side, the checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from tunetool.inspect.ceilings import format_link_speed
from tunetool.measure.ladder.budget import EXPECTED
from tunetool.node.common.files import replace_file
from tunetool.node.units import format_size
from tunetool.record import DriveFacts, Measurement, Record, chosen
from tunetool.report.html import checks, render
from tunetool.report.ladder import RATE_TITLES, RUNG_TITLES, rate_rows, rung_cells, skipped
from tunetool.report.svg_ladder import ladder
from tunetool.report.table import FIGURE_TITLES, figure_name, figure_rows, footnotes, main_figures
from tunetool.view.limits import ceiling_of, what_limits
from tunetool.view.plots import Bar, bar_of, bars
from tunetool.view.text import number

_MEASURED, _WANTED, _SLOW = "#1f6feb", "#8c959f", "#cf222e"
_TIMES = ("read", "write")
"""Directions in which drives were timed."""
_SLOWER = 1.5
"""A drive whose requests take that many times the median of all is marked."""


def write_page(record: Record, path: Path) -> Path | None:
    """Write the page to ``path`` by rename."""
    replace_file(str(path), page(record))
    return path


def page(record: Record) -> str:
    """The text of the page."""
    figures = main_figures(record)
    rates = [m for m in record.measurements if m.quantity == "rate"]
    return render(
        "verify.html.j2",
        record=record,
        limits=list(limits(record)),
        figure_titles=FIGURE_TITLES,
        figures=[[cell.plain for cell in cells] for cells in figure_rows(record, figures)],
        plots=[bars("sequential, GB/s (whiskers: interval)", _bars(record, figures))] if figures else [],
        notes=footnotes(record, figures),
        ladder=_ladder(record),
        drives=_drives(record),
        rate_titles=RATE_TITLES,
        rates=rate_rows(record, rates),
        **checks(record),
    )


def limits(record: Record) -> Iterator[str]:
    """The layer that limits, as far as this record shows it: one line for each finding."""
    loss = record.ladder.loss if record.ladder else None
    if loss is not None:
        yield f"{loss.rung}, the first rung that loses ({loss.cause}): {loss.found}; {loss.remedy}"
    ceiling = ceiling_of(record)
    for figure in main_figures(record):
        reached = what_limits(figure, ceiling if figure.labels["subject"] == "sequential" else None)
        if reached is not None:
            yield f"{figure_name(figure)}: {reached}"
    for check in record.checks:
        if check.status == "fail":
            yield f"{check.id}: {check.found}"
    if record.ladder is None and main_figures(record):
        yield "the layers below the file system were not measured: `tunetool verify --level full` does that"
    elif loss is None and record.ladder is not None:
        yield "no rung of the ladder loses more than is expected of it"


def _bars(record: Record, figures: list[Measurement]) -> list[Bar]:
    wanted = {expectation.name: expectation.value / 1e9 for expectation in record.expectations}
    drawn = []
    for figure in figures:
        drawn.append(bar_of(figure_name(figure), figure, _MEASURED, 1e9))
        expected = wanted.get(figure.name)
        if expected is not None:
            drawn.append(Bar(f"{figure_name(figure)}, expected", expected, expected, expected, _WANTED))
    return drawn


def _ladder(record: Record) -> Mapping[str, Any] | None:
    if record.ladder is None:
        return None
    rungs = record.ladder.rungs
    return {
        "picture": ladder(rungs, ceiling_of(record)),
        "titles": RUNG_TITLES,
        "rows": [(rung.loses, rung_cells(record, rung)) for rung in rungs if rung.skipped is None],
        "skipped": [f"{'; '.join(titles)}: {reason}" for reason, titles in skipped(rungs).items()],
    }


def _drives(record: Record) -> Mapping[str, Any] | None:
    """The drives side by side: what each is, and what was measured of it."""
    alone = {_drive(m): m for m in chosen(record.measurements, "bandwidth", subject="drive")}
    times = {way: {_drive(m): m for m in chosen(record.measurements, "service_time", direction=way)} for way in _TIMES}
    facts = {drive.serial or drive.name: drive for drive in record.node.drives or []}
    measured = dict.fromkeys([*alone, *(drive for by_drive in times.values() for drive in by_drive)])
    if not measured:
        return None
    slow = _below(alone, EXPECTED["alone"].least) | {
        drive for by_drive in times.values() for drive in _above(by_drive, _SLOWER)
    }
    plots = []
    if alone:
        plots.append(bars("each drive alone, GB/s", [_bar(drive, m, slow, 1e9) for drive, m in alone.items()]))
    else:
        for name, by_drive in times.items():
            drawn = [_bar(drive, m, slow, 1e-3) for drive, m in by_drive.items()]
            if drawn:
                plots.append(bars(f"a request of each drive, {name}, ms", drawn))
    return {
        "plots": plots,
        "rows": [_drive_row(drive, facts.get(drive), alone, times, drive in slow) for drive in measured],
    }


def _drive(figure: Measurement) -> str:
    return figure.labels.get("drive", "?")


def _bar(drive: str, figure: Measurement, slow: set[str], unit: float) -> Bar:
    return bar_of(f"{drive} (slow)" if drive in slow else drive, figure, _SLOW if drive in slow else _MEASURED, unit)


def _below(figures: Mapping[str, Measurement], least: float) -> set[str]:
    middle = median(m.value for m in figures.values()) if figures else 0.0
    return {drive for drive, m in figures.items() if m.value < least * middle}


def _above(figures: Mapping[str, Measurement], most: float) -> set[str]:
    middle = median(m.value for m in figures.values()) if figures else 0.0
    return {drive for drive, m in figures.items() if m.value > most * middle}


def _drive_row(
    drive: str,
    facts: DriveFacts | None,
    alone: Mapping[str, Measurement],
    times: Mapping[str, Mapping[str, Measurement]],
    slow: bool,
) -> Mapping[str, Any]:
    link = facts.link if facts else None
    speed = link.current_speed_gts if link else None
    return {
        "drive": drive,
        "slow": slow,
        "alone": number(alone[drive].value / 1e9) if drive in alone else "-",
        "times": [number(times[name][drive].value * 1e3) if drive in times[name] else "-" for name in _TIMES],
        "name": facts.name if facts else "-",
        "model": facts.model if facts else "-",
        "firmware": (facts.firmware if facts else None) or "-",
        "size": format_size(facts.size_bytes) if facts and facts.size_bytes else "-",
        "link": format_link_speed(speed, link.current_width) if link and speed else "-",
        "address": (facts.pci_address if facts else None) or "-",
    }
