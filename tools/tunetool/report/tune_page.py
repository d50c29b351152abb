"""The record of `tune` as an HTML page: the search as a picture, the pairs with the default, and every setting."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunetool.measure.direction import Direction
from tunetool.node.common.files import replace_file
from tunetool.record import Measurement, Record, chosen
from tunetool.report.html import checks, render
from tunetool.report.tune import NUMBERS, TITLES, footnotes, gain_cells, gains_of, settings_of
from tunetool.tune.explain import curve, shown
from tunetool.tune.settings import DEFAULTS, AioSettings
from tunetool.view.limits import ceiling_of, what_limits
from tunetool.view.plots import bar_of, bars
from tunetool.view.points import Level, Point, point_of, points, words
from tunetool.view.text import interval_words, number, scale

_TRIED, _CHOSEN, _DEFAULT = "#1f6feb", "#d55e00", "#8c6d1f"
_DIRECTIONS: tuple[Direction, ...] = ("read", "write")
_MOST_DOTS, _MOST_ROWS, _MOST_VALUES = 200, 200, 100


@dataclass(frozen=True)
class Search:
    """What a record says of its search."""

    gains: Sequence[Measurement]
    tried: Mapping[AioSettings, Mapping[str, Measurement]]
    """By settings and direction."""
    ceiling: float | None

    @property
    def chosen(self) -> AioSettings | None:
        """The settings of the block; None where the search did not end."""
        return settings_of(self.gains[-1]) if self.gains else None

    def sides(self, direction: Direction) -> list[tuple[AioSettings, Measurement]]:
        """The settings with a figure in this direction, the fastest first."""
        found = [(settings, sides[direction]) for settings, sides in self.tried.items() if direction in sides]
        return sorted(found, key=lambda each: -each[1].value)


def write_page(record: Record, path: Path) -> Path | None:
    """Write the page to ``path`` by rename."""
    replace_file(str(path), page(record))
    return path


def page(record: Record) -> str:
    """The text of the page."""
    search = search_of(record)
    ratios = [bar_of(str(gain.parameters["goal"]), gain, _CHOSEN) for gain in search.gains]
    order = sorted(search.tried, key=lambda settings: -max(side.value for side in search.tried[settings].values()))
    return render(
        "tune.html.j2",
        record=record,
        limits=list(limits(search)),
        pictures=[picture for direction in _DIRECTIONS if (picture := _picture(search, direction))],
        titles=[(title, title in NUMBERS) for title in TITLES],
        gains=[(False, gain_cells(gain)) for gain in search.gains],
        ratios=bars("times the speed of DeepSpeed's default (whiskers: interval over pairs)", ratios) if ratios else "",
        notes=footnotes(record, list(search.gains)) if search.gains else [],
        block=json.dumps({"aio": search.chosen.block()}, indent=2) if search.chosen is not None else "",
        values=list(_values(record))[:_MOST_VALUES],
        rows=[_row(search, settings) for settings in order[:_MOST_ROWS]],
        more=max(0, len(order) - _MOST_ROWS),
        **checks(record),
    )


def search_of(record: Record) -> Search:
    """The search in a record, complete or not."""
    tried: dict[AioSettings, dict[str, Measurement]] = {}
    for figure in chosen(record.measurements, "bandwidth", subject="tune"):
        tried.setdefault(settings_of(figure), {})[figure.labels["direction"]] = figure
    return Search(gains_of(record), tried, ceiling_of(record))


def limits(search: Search) -> Iterator[str]:
    """What limits the chosen settings: the program, the links, or the settings themselves."""
    if search.chosen is None:
        return
    for direction, figure in search.tried.get(search.chosen, {}).items():
        reached = what_limits(figure, search.ceiling)
        if reached is not None:
            yield f"{direction}: {reached}"
    written = search.gains[-1]
    if written.parameters["significant"]:
        interval = written.confidence
        spread = f" ({number(interval.low)} to {number(interval.high)})" if interval else ""
        yield (
            f"DeepSpeed's default settings: {search.chosen} moves {number(written.value)}{spread} times as much for "
            f"the goal {written.parameters['goal']}"
        )
    else:
        yield (
            f"not the settings for the goal {written.parameters['goal']}: of {len(search.tried)} that were tried, none "
            "is faster than DeepSpeed's default by more than chance"
        )


def _picture(search: Search, direction: Direction) -> str | None:
    """The settings that were tried, the fastest first; the chosen and the default one are always drawn."""
    sides = search.sides(direction)
    if not sides:
        return None
    factor, unit = scale("B/s", sides[0][1].value)
    own = next((settings_of(gain) for gain in search.gains if gain.parameters["goal"] == direction), None)
    named = {search.chosen, own, DEFAULTS}
    kept = [each for place, each in enumerate(sides) if place < _MOST_DOTS or each[0] in named]
    drawn = [_point(search, settings, figure, factor, own) for settings, figure in kept]
    title = f"{direction}, {unit}: {len(sides)} settings tried"
    levels = [Level("default", point.value) for point, (each, _) in zip(drawn, kept, strict=True) if each == DEFAULTS]
    if search.ceiling is not None:
        levels.append(Level("links' ceiling", search.ceiling / factor))
    told = [f"fastest {words(drawn[0])}; slowest {words(drawn[-1])}"]
    told += [f"{point.pin}, {words(point)}" for point in drawn if point.pin]
    told += [f"{level.name} {number(level.value)}" for level in levels]
    left_out = len(sides) - len(kept)
    more = f"; {left_out} slower ones are not drawn" if left_out else ""
    return points(
        title, f"{title}: {'; '.join(told)}{more}", drawn, levels, f"the fastest first; whiskers: interval{more}"
    )


def _point(search: Search, settings: AioSettings, figure: Measurement, factor: float, own: AioSettings | None) -> Point:
    direction = str(figure.parameters["direction"])
    plain = point_of(str(settings), figure, _TRIED, factor)
    if settings == search.chosen:
        kept = "DeepSpeed's default, kept" if settings == DEFAULTS else f"chosen: {settings}"
        return replace(plain, colour=_CHOSEN, radius=4.5, pin=kept)
    if settings == own and settings != DEFAULTS:
        return replace(plain, colour=_CHOSEN, radius=3.5, pin=f"best for {direction}s alone: {settings}")
    return replace(plain, colour=_DEFAULT, radius=4.5) if settings == DEFAULTS else plain


def _values(record: Record) -> Iterator[Mapping[str, Any]]:
    """For each value of a parameter that was varied, the speeds with it."""
    for name in DEFAULTS.block():
        by_value: dict[int | bool, dict[str, Any]] = {}
        for direction in _DIRECTIONS:
            for point in curve(record.measurements, name, direction):
                by_value.setdefault(point.value, {})[direction] = point
        if len(by_value) > 1:
            for value, sides in sorted(by_value.items()):
                speeds = [
                    (number(side.best / 1e9), number(side.typical / 1e9)) if side is not None else ("-", "-")
                    for side in (sides.get(direction) for direction in _DIRECTIONS)
                ]
                yield {"name": name, "value": shown(name, value), "number": int(value), "speeds": speeds}


def _row(search: Search, settings: AioSettings) -> Mapping[str, Any]:
    sides = [search.tried[settings].get(direction) for direction in _DIRECTIONS]
    marks = [word for word, which in (("chosen", search.chosen), ("default", DEFAULTS)) if settings == which]
    return {
        "settings": str(settings),
        "marks": ", ".join(marks),
        "speeds": [number(side.value / 1e9) if side is not None else "-" for side in sides],
        "intervals": [interval_words(side) if side is not None else "-" for side in sides],
        "samples": sum(len(side.samples or []) for side in sides if side is not None),
    }
