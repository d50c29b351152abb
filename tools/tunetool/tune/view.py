"""What `tune` shows: the choice for each goal, the search as a picture, and what each parameter does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tunetool.measure import Direction
from tunetool.record import Measurement, Record, chosen
from tunetool.tune.explain import curve, shown
from tunetool.tune.outcome import GAIN
from tunetool.tune.pairs import SHOWN
from tunetool.tune.settings import DEFAULTS, AioSettings, from_block
from tunetool.view.figures import ceiling_of, what_limits
from tunetool.view.model import Block, Cell, Cells, Notes, Plot, Section, Table, Verbatim, View
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


def view(record: Record, directory: Path | None = None) -> View:
    """What is shown: the choice, and on a page all that was tried."""
    search = search_of(record)
    sections = [
        Section("The choice", list(_choice(record, search))),
        Section("The search", list(_tried(search)), on="page"),
        Section("What each parameter does", list(_values(record)), on="page"),
        Section("Checks", [Notes([f"{check.id}: {check.found}" for check in record.checks])], on="terminal"),
    ]
    return View(
        f"DeepSpeed's aio settings for {record.node.host}",
        sections=[section for section in sections if section.blocks],
        advice=list(limits(search)),
        checks=True,
    )


def settings_of(figure: Measurement) -> AioSettings:
    """The settings that a figure of a search is about."""
    return from_block({name: figure.parameters[name] for name in DEFAULTS.block()})  # type: ignore[misc]


def search_of(record: Record) -> Search:
    """The search in a record, complete or not."""
    tried: dict[AioSettings, dict[str, Measurement]] = {}
    for figure in chosen(record.measurements, "bandwidth", subject="tune"):
        tried.setdefault(settings_of(figure), {})[figure.labels["direction"]] = figure
    gains = chosen(record.measurements, GAIN, subject="tune")
    return Search(gains, tried, ceiling_of(record))


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
            f"the goal {written.labels['goal']}"
        )
    else:
        yield (
            f"not the settings for the goal {written.labels['goal']}: of {len(search.tried)} that were tried, none "
            "is faster than DeepSpeed's default by more than chance"
        )


def _choice(record: Record, search: Search) -> Iterator[Block]:
    if search.chosen is None:
        return
    ratios = [bar_of(gain.labels["goal"], gain, _CHOSEN) for gain in search.gains]
    yield Plot(bars("times the speed of DeepSpeed's default (whiskers: interval over pairs)", ratios))
    titles = ("goal", "block x depth x threads", "GB/s", "default", "ratio", "from", "to", "result")
    yield Table(titles, [_gain(gain) for gain in search.gains], numbers=titles[2:-1], sortable=False)
    yield Notes(list(_notes(record, search.gains)))
    block = json.dumps({"aio": search.chosen.block()}, indent=2)
    yield Verbatim(block, folded="The block for DeepSpeed's configuration")


def _gain(gain: Measurement) -> Cells:
    given, interval = gain.parameters, gain.confidence
    better = bool(given["significant"])
    return [
        gain.labels["goal"],
        str(settings_of(gain)) if better else "DeepSpeed's default",
        f"{float(given['rate']) / 1e9:.3f}",
        f"{float(given['default_rate']) / 1e9:.3f}",
        f"{gain.value:.3f}",
        f"{interval.low:.3f}" if interval else "",
        f"{interval.high:.3f}" if interval else "",
        "faster" if better else "no significant difference",
    ]


def _notes(record: Record, gains: Sequence[Measurement]) -> Iterator[str]:
    """How the pairs were measured, and what the drives counted."""
    # The lowest level of the intervals: a few pairs reach none that is high.
    levels = [gain.confidence.level for gain in gains if gain.confidence and gain.confidence.level is not None]
    yield (
        f"{gains[0].engine}; mix {gains[-1].parameters['mix']}; ratio: median over pairs with DeepSpeed's default, "
        f"{min([SHOWN, *levels]):.0%} interval"
    )
    figures = [(each, each.evidence) for each in record.measurements if each.evidence is not None]
    claimed = sum(proof.claimed_bytes or 0 for _, proof in figures)
    counted = sum(proof.counted_bytes or 0 for _, proof in figures)
    yield (
        f"evidence: block {counted / claimed:.4f} over {sum(len(each.samples or []) for each, _ in figures)} samples, "
        f"{figures[0][0].parameters['samples_thrown_away']} discarded (other I/O)"
        if claimed
        else "evidence: none"
    )


def _tried(search: Search) -> Iterator[Block]:
    """The settings as dots and, behind a summary, as rows: the fastest first."""
    pictures = [picture for direction in _DIRECTIONS if (picture := _picture(search, direction))]
    if not pictures:
        return
    yield Notes(
        [
            "each dot is a setting: bytes of a block x requests in flight x threads; slow settings were measured less "
            "often than fast ones"
        ]
    )
    yield from map(Plot, pictures)
    order = sorted(search.tried, key=lambda settings: -max(side.value for side in search.tried[settings].values()))
    titles = ("setting", "mark", "read, GB/s", "interval", "write, GB/s", "interval", "samples")
    rows = [_row(search, settings) for settings in order[:_MOST_ROWS]]
    yield Table(titles, rows, numbers=(titles[2], titles[4], titles[6]), folded="All settings that were tried")
    if len(order) > _MOST_ROWS:
        yield Notes([f"{len(order) - _MOST_ROWS} slower ones are in the record"])


def _picture(search: Search, direction: Direction) -> str | None:
    """The settings that were tried, the fastest first; the chosen and the default one are always drawn."""
    sides = search.sides(direction)
    if not sides:
        return None
    factor, unit = scale("B/s", sides[0][1].value)
    own = next((settings_of(gain) for gain in search.gains if gain.labels["goal"] == direction), None)
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
    direction = figure.labels["direction"]
    plain = point_of(str(settings), figure, _TRIED, factor)
    if settings == search.chosen:
        kept = "DeepSpeed's default, kept" if settings == DEFAULTS else f"chosen: {settings}"
        return replace(plain, colour=_CHOSEN, radius=4.5, pin=kept)
    if settings == own and settings != DEFAULTS:
        return replace(plain, colour=_CHOSEN, radius=3.5, pin=f"best for {direction}s alone: {settings}")
    return replace(plain, colour=_DEFAULT, radius=4.5) if settings == DEFAULTS else plain


def _values(record: Record) -> Iterator[Block]:
    """For each value of a parameter that was varied, the speeds with it."""
    rows: list[Cells] = []
    for name in DEFAULTS.block():
        curves = [curve(record.measurements, name, direction) for direction in _DIRECTIONS]
        sides = [{point.value: (point.best, point.typical) for point in points} for points in curves]
        values = sorted({value for side in sides for value in side})
        if len(values) > 1:
            for value in values:
                speeds = [speed for side in sides for speed in side.get(value, (None, None))]
                cells = ("-" if speed is None else number(speed / 1e9) for speed in speeds)
                rows.append([name, Cell(shown(name, value), number=value), *cells])
    if rows:
        titles = ("parameter", "value", "read, best", "read, typical", "write, best", "write, typical")
        yield Notes(["GB/s with each value: by the fastest setting that has it, and the median of all that have it"])
        yield Table(titles, rows[:_MOST_VALUES], numbers=titles[2:])


def _row(search: Search, settings: AioSettings) -> Cells:
    sides = [search.tried[settings].get(direction) for direction in _DIRECTIONS]
    marks = [word for word, which in (("chosen", search.chosen), ("default", DEFAULTS)) if settings == which]
    speeds = [(number(side.value / 1e9), interval_words(side)) if side is not None else ("-", "-") for side in sides]
    samples = sum(len(side.samples or []) for side in sides if side is not None)
    return [str(settings), ", ".join(marks), *(cell for pair in speeds for cell in pair), str(samples)]
