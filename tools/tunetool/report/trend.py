"""One figure over many records: a row for each with a bar, the oldest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from tunetool.errors import UsageProblem
from tunetool.measure.statistics import DIFFERENCE_ERROR, difference
from tunetool.record import Measurement, Record
from tunetool.report.flat import Cell, interval
from tunetool.report.page import add_number_columns, new_table, print_block, word
from tunetool.report.runs import Kept
from tunetool.view.figures import label, selection
from tunetool.view.text import format_value

TITLES = ("time", "record", "figure", "value", "low", "high", "unit", "since the one before", "verdict")
_BAR = 24
NOISE = "within the noise"


@dataclass(frozen=True)
class Point:
    """The figure in one record."""

    run: str
    record: Record
    figure: Measurement
    series: str
    """What it is of: figures of one series are compared, those of other hosts and drives are not."""
    change: str
    """Whether it is faster or slower than in the record before, by more than chance; empty for the first."""


def points(runs: Sequence[Kept], wanted: str, host: str | None = None) -> list[Point]:
    """The figures ``wanted`` of these records, the oldest first, told apart by name, drive, rank and host.

    Raises ``UsageProblem`` where no record has one, and for a text that means none.
    """
    pick = selection(wanted)
    kept = [each for each in runs if each.record is not None]
    result: list[Point] = []
    before: dict[str, Measurement] = {}
    for each in sorted(kept, key=lambda each: each.record.started if each.record else 0):
        if each.record is None:
            continue
        for figure in pick(each.record.measurements):
            where = figure.host or each.record.node.host
            if host not in (None, where):
                continue
            series = label(figure) if figure.host else f"{label(figure)} {where}"
            result.append(Point(each.name, each.record, figure, series, _change(before.get(series), figure)))
            before[series] = figure
    if not result:
        known = sorted({figure.name for each in kept if each.record for figure in each.record.measurements})
        shown = ", ".join(known[:12]) + (" ..." if len(known) > 12 else "")
        raise UsageProblem(
            f"no record has a figure `{wanted}`", f"these are there: {shown}" if known else "measure first"
        )
    return result


def later(runs: Sequence[Kept], shown: Sequence[Point], host: str | None = None) -> list[tuple[str, str]]:
    """Status and a line of the newest record that follows all of ``shown``, has no such figure, and is no pass."""
    kinds, last = {each.record.kind for each in shown}, max(each.record.started for each in shown)
    newer = [
        (record.started, kept.name, record.verdict)
        for kept in runs
        if (record := kept.record) is not None
        and record.kind in kinds
        and record.started > last
        and record.verdict is not None
        and record.verdict.status != "pass"
        and (host is None or host in (record.node.host, *(each.host for each in record.hosts or [])))
    ]
    if not newer:
        return []
    _, name, verdict = max(newer, key=lambda each: each[:2])
    why = next(iter(verdict.reasons), "no reason")
    return [(verdict.status, f"{verdict.status.upper()}: {name} has no such figure: {why}")]


def _change(before: Measurement | None, now: Measurement) -> str:
    if before is None:
        return ""
    if before.medium != now.medium:
        return "another medium"
    tested = difference(before.samples or [before.value], now.samples or [now.value])
    if tested.least > DIFFERENCE_ERROR:
        return "too few samples"
    if tested.probability > DIFFERENCE_ERROR or tested.ratio == 1:
        return NOISE
    return "faster" if (tested.ratio > 1) == (now.better == "higher") else "slower"


def rows(shown: Sequence[Point]) -> list[tuple[Cell, ...]]:
    """The cells of each point, for the columns ``TITLES``."""
    return [
        (
            *(f"{each.record.started:%Y-%m-%dT%H:%M:%SZ}", each.run, label(each.figure), each.figure.value),
            *(*interval(each.figure), each.figure.unit, each.change),
            each.record.verdict.status if each.record.verdict else None,
        )
        for each in shown
    ]


def print_trend(shown: Sequence[Point], console: Console, after: Sequence[tuple[str, str]] = ()) -> None:
    """The points for people: a bar from zero to the value, and the end of its interval; ``after``: see ``later``."""
    table = new_table()
    table.add_column("record", overflow="fold")
    add_number_columns(table, "value")
    table.add_column("", min_width=_BAR)
    table.add_column("since the one before")
    table.add_column("verdict")
    highs = (interval(each.figure)[1] or each.figure.value for each in shown)
    top = max((abs(high) for high in highs), default=0.0) or 1.0
    several = len({label(each.figure) for each in shown}) > 1
    for each in shown:
        name = f"{each.run} {label(each.figure)}" if several else each.run
        value = format_value(each.figure.value, each.figure.unit)
        status = each.record.verdict.status.upper() if each.record.verdict else "-"
        table.add_row(name, value, _bar(each.figure, top), each.change, word(status))
    console.print(table)
    for _, line in after:
        print_block(console, line, 2)


def _bar(figure: Measurement, top: float) -> str:
    low, high = interval(figure)
    value = round(_BAR * abs(figure.value) / top)
    first, last = (round(_BAR * abs(edge) / top) if edge is not None else value for edge in (low, high))
    return "█" * min(first, value) + "▒" * max(0, last - min(first, value))
