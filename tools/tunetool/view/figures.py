"""The figures of a record: which are meant, what limits one, and what is shown of a record of any kind: all of them, as
bars for each unit and as rows, and its checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tunetool.record import Measurement, Record, chosen
from tunetool.verdict import tester_limit
from tunetool.view.model import Block, Cell, Cells, Notes, Plot, Section, Table, View
from tunetool.view.plots import bar_of, bars
from tunetool.view.text import format_value, interval_words, scale


def label(figure: Measurement) -> str:
    """A figure's name, with what tells it from others of that name."""
    rank = f"rank {figure.rank}" if figure.rank is not None else None
    return " ".join(str(part) for part in (figure.name, figure.labels.get("drive"), rank, figure.host) if part)


def selection(text: str) -> Callable[[Iterable[Measurement]], list[Measurement]]:
    """What picks the figures that ``text`` means: those of this name, or ``durable,engine=direct``: the figure, if one
    is given, and any labels.
    """

    def pick(figures: Iterable[Measurement]) -> list[Measurement]:
        known = list(figures)
        named = [each for each in known if text in (each.name, label(each))]
        return named or (chosen(known, figure, **labels) if labels else [])

    figure, labels = _parsed(text)
    return pick


def _parsed(text: str) -> tuple[str | None, dict[str, str]]:
    figure: str | None = None
    labels: dict[str, str] = {}
    for part in text.split(","):
        key, sign, value = (each.strip() for each in part.partition("="))
        if sign:
            labels[key] = value
        else:
            figure = key
    return figure, labels


_COLOUR = "#1f6feb"
_MOST_ROWS, _MOST_BARS = 400, 40
_TITLES = ("figure", "median", "interval", "medium", "program")


def view(record: Record, _: Path | None = None) -> View:
    """What is shown."""
    return View(f"{record.kind} on {record.node.host}", sections=figures(record, on=""), checks=True)


def figures(record: Record, on: str = "page") -> list[Section]:
    """The section of all figures, where there is any."""
    return [Section("Figures", list(_blocks(record)), on=on)] if record.measurements else []


def has_reasons(record: Record) -> bool:
    """Whether a page without figures says something: why there are none."""
    return record.verdict is not None and record.verdict.status != "pass" and bool(record.verdict.reasons)


def _blocks(record: Record) -> Iterator[Block]:
    by_unit: dict[str, list[Measurement]] = {}
    for figure in record.measurements:
        by_unit.setdefault(figure.unit, []).append(figure)
    for unit, known in by_unit.items():
        factor, shown = scale(unit, max(abs(figure.value) for figure in known))
        drawn = [bar_of(label(figure), figure, _COLOUR, factor) for figure in known[:_MOST_BARS]]
        yield Plot(bars(shown or "ratio", drawn))
    yield Table(_TITLES, [_row(figure) for figure in record.measurements[:_MOST_ROWS]], ("median",))
    if (more := len(record.measurements) - _MOST_ROWS) > 0:
        yield Notes([f"{more} more are in the record."])


def _row(figure: Measurement) -> Cells:
    value = Cell(format_value(figure.value, figure.unit), number=figure.value)
    return [label(figure), value, interval_words(figure), figure.medium, figure.engine]


_NEAR = 0.9
"""From this share of the links' ceiling on, the links are what limits."""


def ceiling_of(record: Record) -> float | None:
    """What the drives' links carry; None where the record does not say."""
    return next((each.value for each in chosen(record.measurements, "ceiling")), None)


def what_limits(figure: Measurement, ceiling: float | None) -> str | None:
    """The program that measured, or the drives' links; None where neither was near its limit.

    What exceeds the ceiling does not go through the links: virtual drives state some that nothing uses.
    """
    slow_tester = tester_limit(figure)
    if slow_tester is None and ceiling is not None and _NEAR * ceiling <= figure.value <= ceiling:
        return f"the drives' links, {figure.value / ceiling:.0%} of what they carry"
    return slow_tester
