"""The record of `bench reference` as one HTML page: every part with its verdict, the nodes, the figures as bars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tunetool.node.common.files import replace_file
from tunetool.node.play.reasons import by_reason
from tunetool.record import Measurement, Part, Record
from tunetool.report.html import render
from tunetool.report.reference import value_of
from tunetool.view.plots import bar_of, bars
from tunetool.view.text import interval_of, number

_COLOUR = "#1f6feb"
_TITLES: Mapping[str, str] = {
    "verify": "Storage",
    "checkpoint": "Checkpoints: the fastest durable save of each node, and its restore",
    "staging": "Model and data in memory, or read in place",
    "strategies": "Steps by nodes, ranks and ZeRO stage",
}
_UNITS: Mapping[str, tuple[str, float]] = {"B/s": ("GB/s", 1e9), "s": ("s", 1.0)}
"""What a plot shows, and how much of the record's unit that is."""


def write_page(record: Record, path: Path, pages: Mapping[str, str]) -> Path | None:
    """Write the page to ``path`` by rename; None where no part was run. ``pages``: a link to each part's own page."""
    if not any(part.run for part in record.parts or []):
        return None
    replace_file(str(path), page(record, pages))
    return path


def page(record: Record, pages: Mapping[str, str]) -> str:
    """The text of the page."""
    return render(
        "reference.html.j2",
        record=record,
        parts=[_part(part, pages) for part in record.parts or []],
        limits=[
            f"{part.name}: {reason}"
            for part in record.parts or []
            if part.status not in ("pass", "skip")
            for reason in part.reasons[:1]
        ],
        hosts=by_reason((host.host, host.status, next(iter(host.reasons), "")) for host in record.hosts or []),
        sections=list(_sections(record)),
    )


def _part(part: Part, pages: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": part.name,
        "verdict": "not run" if part.status == "skip" else part.status.upper(),
        "status": part.status,
        "run": part.run or "-",
        "link": pages.get(part.name),
        "reason": next(iter(part.reasons), ""),
    }


def _no_interval(figure: Measurement) -> str:
    return "none: one round" if len(figure.samples or []) == 1 else "-"


def _sections(record: Record) -> Iterator[dict[str, Any]]:
    for part, title in _TITLES.items():
        figures = [each for each in record.measurements if _part_of(each) == part]
        if figures:
            plots = [
                bars(shown, [bar_of(_name(each), each, _COLOUR, size) for each in figures if each.unit == unit])
                for unit, (shown, size) in _UNITS.items()
                if any(each.unit == unit for each in figures)
            ]
            yield {"title": title, "plots": plots, "rows": [_row(each) for each in figures]}


def _part_of(figure: Measurement) -> str:
    subject = figure.labels["subject"]
    return subject if subject in _TITLES else "verify"


def _name(figure: Measurement) -> str:
    part = _part_of(figure)
    short = figure.name.removeprefix(f"{part}.").removeprefix("step.")  # shorter for people, not read
    return f"{short} {figure.host}" if figure.host else short


def _row(figure: Measurement) -> dict[str, Any]:
    interval = interval_of(figure)
    size = _UNITS.get(figure.unit, ("", 1.0))[1]
    return {
        "name": figure.name,
        "value": value_of(figure),
        "number": figure.value,
        "interval": f"{number(interval.low / size)} to {number(interval.high / size)}"
        if interval
        else _no_interval(figure),
        "medium": figure.medium,
        "host": figure.host or "-",
    }
