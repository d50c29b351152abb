"""One figure over many records as an HTML page: a plot for each series, what changed, and a row for each record."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tunetool.measure.made_by import made_by
from tunetool.node.units import format_count
from tunetool.record import Record
from tunetool.report.html import evidence, of_tool, render
from tunetool.report.trend import NOISE, Point
from tunetool.verdict import WORST_FIRST
from tunetool.view.points import point_of, points, words
from tunetool.view.text import format_value, interval_words, scale

_COLOURS = {"faster": "#2da44e", "slower": "#cf222e", "another medium": "#8c6d1f"}
_PLAIN = "#1f6feb"
_MOST_PLOTS, _MOST_ROWS, _MOST_CHANGES, _MOST_SAID = 12, 250, 20, 24
_MOST_DOTS = 600
"""Of all plots together; each shows its newest records."""


def page(shown: Sequence[Point], figure: str, command: Sequence[str], later: Sequence[tuple[str, str]] = ()) -> str:
    """The text of the page; ``shown`` is not empty, and in the order of time; ``later``: see ``trend.later``."""
    series: dict[str, list[Point]] = {}
    for each in shown:
        series.setdefault(each.series, []).append(each)
    # The series whose newest record is no pass come first, then those whose newest figure is slower.
    ranked = sorted(series, key=lambda name: (_passed(series[name][-1]), series[name][-1].change != "slower", name))
    dots = _MOST_DOTS // min(_MOST_PLOTS, len(series))
    changed = [each for each in shown if each.change in _COLOURS]
    records = {each.record.id: each.record for each in shown}
    return render(
        "trend.html.j2",
        figure=figure,
        records=len(records),
        until=shown[-1].record.started,
        several=len(series) > 1,
        status=_worst([each[-1] for each in series.values()], [status for status, _ in later]),
        newest=[*(line for _, line in later), *(_newest(series[name]) for name in ranked[:_MOST_PLOTS])],
        changes=[_change(each) for each in reversed(changed[-_MOST_CHANGES:])],
        older=max(0, len(changed) - _MOST_CHANGES),
        plots=[_plot(name, series[name][-dots:]) for name in ranked[:_MOST_PLOTS]],
        left_out=len(ranked[_MOST_PLOTS:]),
        rows=[_row(each) for each in shown[-_MOST_ROWS:]],
        more=max(0, len(shown) - _MOST_ROWS),
        evidence=evidence([(f"{each.series} in {each.run}", each.figure) for each in reversed(shown)]),
        command=shlex.join(command),
        provenance=list(_provenance(shown, list(records.values()))),
    )


def _passed(each: Point) -> bool:
    return each.record.verdict is None or each.record.verdict.status == "pass"


def _worst(last: Sequence[Point], later: Sequence[str]) -> str:
    """The worst verdict of the newest records; empty where none was judged."""
    found = {*later, *(each.record.verdict.status for each in last if each.record.verdict)}
    return next((status for status in WORST_FIRST if status in found), "")


def _newest(series: Sequence[Point]) -> str:
    last = series[-1]
    verdict = last.record.verdict
    short = verdict is not None and verdict.status != "pass"
    # Its verdict comes first: a figure that stays too low is no good news.
    head = f"{verdict.status.upper()}: " if verdict is not None and short else ""
    value = f"{head}{last.series}: {format_value(last.figure.value, last.figure.unit)}"
    if not last.change:
        return f"{value}; there is no record before it"
    change = "unchanged" if short and last.change == NOISE else last.change
    first = series[0].figure.value
    since = f"; {last.figure.value / first:.0%} of the first record's" if first else ""
    return f"{value}; {change}, against the record before{since}"


def _change(each: Point) -> str:
    value = format_value(each.figure.value, each.figure.unit)
    return f"{each.record.started:%Y-%m-%d %H:%M}: {each.series}: {each.change}, {value} ({each.run})"


def _plot(name: str, series: Sequence[Point]) -> str:
    unit = series[0].figure.unit
    factor, shown = scale(unit, max(abs(each.figure.value) for each in series))
    drawn = [
        replace(
            point_of(each.run, each.figure, _COLOURS.get(each.change, _PLAIN), factor),
            radius=4.5 if each.change in _COLOURS else 3,
            below=f"{each.record.started:%Y-%m-%d}",
        )
        for each in series
    ]
    title = f"{name}, {shown}" if shown else name
    told = [f"{words(point)} {each.change}".strip() for point, each in zip(drawn, series, strict=True)]
    before = f"{format_count(len(told) - _MOST_SAID, 'older record')}; " if len(told) > _MOST_SAID else ""
    said = f"{title}: {before}{'; '.join(told[-_MOST_SAID:])}"
    legend = "the oldest first; large dots changed: green faster, red slower than the one before; whiskers: interval"
    return points(title, said, drawn, below=legend)


def _row(each: Point) -> Mapping[str, Any]:
    return {
        "time": f"{each.record.started:%Y-%m-%d %H:%M}",
        "run": each.run,
        "series": each.series,
        "number": each.figure.value,
        "value": format_value(each.figure.value, each.figure.unit),
        "interval": interval_words(each.figure),
        "samples": len(each.figure.samples or []),
        "change": each.change or "-",
        "status": each.record.verdict.status if each.record.verdict else "-",
    }


def _provenance(shown: Sequence[Point], kept: Sequence[Record]) -> Iterator[tuple[str, str]]:
    yield from of_tool(made_by())
    made = sorted({each.tool.version for each in kept if each.tool is not None})
    if made:
        yield "records made by", f"tunetool {', '.join(made)}"
    first, last = (f"{each.started:%Y-%m-%d %H:%M}" for each in (kept[0], kept[-1]))
    yield "records", f"{len(kept)}, {first} to {last} UTC; each has its hash in its record.json"
    yield "media", ", ".join(sorted({each.figure.medium for each in shown})[:8])
    hardware = {each.node.speed_hash for each in kept if each.node.speed_hash}
    if hardware:
        yield "hashes of what affects speed", f"{len(hardware)} over these records"
