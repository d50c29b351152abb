"""The record of `bench ds-io` as an HTML page: its figures beside other settings and fio on the same storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.bench.ds_io import DURABLE, KIND
from tunetool.measure.direction import Direction
from tunetool.measure.figures import sequential_figures
from tunetool.node.common.files import replace_file
from tunetool.node.units import format_size_binary
from tunetool.record import Measurement, Record
from tunetool.report.ds_io import figures_of
from tunetool.report.html import checks, render
from tunetool.report.runs import newest_beside
from tunetool.tune.settings import AioSettings
from tunetool.view.limits import ceiling_of, what_limits
from tunetool.view.plots import bar_of, bars
from tunetool.view.text import interval_of, interval_words, number

_THIS, _OTHER, _FIO = "#1f6feb", "#8c959f", "#2da44e"
_MOST_RUNS, _MOST_VERIFIED = 60, 10
"""Records that are read to find what may be held against this one: the newest."""
_MOST_BARS = 24
_OWN = "this run"
_SHAPE = ("block_bytes", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events")
_DIRECTIONS: tuple[Direction, ...] = ("read", "write")


@dataclass(frozen=True)
class Beside:
    """Figures of other records about the same storage of the same machine."""

    runs: Sequence[tuple[str, Measurement]] = ()
    """Of other runs of the handle, the newest first; each with the name of its record."""
    fio: Mapping[str, tuple[str, Measurement]] = field(default_factory=dict)
    """By direction, what fio reached in the newest `verify`."""


def write_page(record: Record, path: Path) -> Path | None:
    """Write the page to ``path`` by rename. Records beside its directory are held against it."""
    replace_file(str(path), page(record, beside(record, path.parent.parent)))
    return path


def page(record: Record, others: Beside | None = None) -> str:
    """The text of the page."""
    others = others or Beside()
    own = [(_OWN, figure) for figure in figures_of(record)]
    every = [*own, *others.runs]
    return render(
        "ds-io.html.j2",
        record=record,
        limits=list(_limits(record, others)),
        pictures=[picture for direction in _DIRECTIONS if (picture := _picture(direction, every, others))],
        rows=[_row(run, figure, others) for run, figure in every],
        fio=[
            f"{direction}: {figure.engine}: {number(figure.value / 1e9)} GB/s ({interval_words(figure)}), from {run}"
            for direction, (run, figure) in others.fio.items()
        ],
        **checks(record),
    )


def beside(record: Record, runs_dir: Path) -> Beside:
    """What the records beside this one say of the same storage."""
    own = figures_of(record)
    if not own:
        return Beside()
    runs = [
        (name, figure)
        for name, other in newest_beside(runs_dir, KIND, _MOST_RUNS)
        if other.id != record.id and other.node.host == record.node.host
        for figure in figures_of(other)
        if _same_storage(figure, own[0]) and _is_whole(figure)
    ]
    fio: dict[str, tuple[str, Measurement]] = {}
    for name, other in newest_beside(runs_dir, "verify", _MOST_VERIFIED):
        if other.node.host != record.node.host:
            continue
        for direction, found in sequential_figures(other.measurements).items():
            if _same_storage(found, own[0]):
                fio.setdefault(direction, (name, found))
    return Beside(runs, fio)


def _is_whole(figure: Measurement) -> bool:
    """Whether a record of another version says how it was measured."""
    numbers = [figure.parameters.get(name) for name in _SHAPE]
    named = figure.parameters.get("direction") in _DIRECTIONS and "device" in figure.parameters
    return named and all(isinstance(number, int) for number in numbers)


def _same_storage(one: Measurement, other: Measurement) -> bool:
    counted = [each.evidence.device if each.evidence else None for each in (one, other)]
    return one.medium == other.medium and (None in counted or counted[0] == counted[1])


def _limits(record: Record, others: Beside) -> Iterator[str]:
    ceiling = ceiling_of(record)
    for figure in figures_of(record):
        direction = str(figure.parameters["direction"])
        reached = what_limits(figure, ceiling)
        if reached is not None:
            yield f"{_words(figure)}: {reached}"
        elif direction in others.fio:
            run, fio = others.fio[direction]
            share = f"fio moved {number(fio.value / figure.value)} times as much on this storage ({run})"
            if _ends(fio)[0] > _ends(figure)[1]:
                yield f"{_words(figure)}: the settings of the handle: {share}; `tunetool tune` searches better ones"
            else:
                yield f"{_words(figure)}: the storage, as far as fio shows it: {share}"
        else:
            yield f"{_words(figure)}: not known: no record of `tunetool verify` for this storage lies beside this one"


def _ends(figure: Measurement) -> tuple[float, float]:
    interval = interval_of(figure)
    return (interval.low, interval.high) if interval else (figure.value, figure.value)


def _words(figure: Measurement) -> str:
    return f"{figure.parameters['direction']}{', synced' if figure.figure == DURABLE else ''}"


def _settings(figure: Measurement) -> str:
    given = figure.parameters
    shape = AioSettings(
        block_size=int(given["block_bytes"]),
        queue_depth=int(given["queue_depth"]),
        intra_op_parallelism=int(given["intra_op_parallelism"]),
        single_submit=bool(given["single_submit"]),
        overlap_events=bool(given["overlap_events"]),
        use_gds=given["device"] == "gds",
    )
    memory = ", GPU memory" if given["device"] != "cpu" else ""
    return f"{shape}{memory}"


def _picture(direction: Direction, every: Sequence[tuple[str, Measurement]], others: Beside) -> str | None:
    """The runs of one direction, this one first, then the fastest; and what fio reached."""
    sides = [(run, figure) for run, figure in every if figure.parameters["direction"] == direction]
    if not sides:
        return None
    own = [
        bar_of(f"this run{', synced' if figure.figure == DURABLE else ''}: {_settings(figure)}", figure, _THIS, 1e9)
        for run, figure in sides
        if run == _OWN
    ]
    rest = [figure for run, figure in sides if run != _OWN and figure.figure != DURABLE]
    ranked = sorted(rest, key=lambda figure: -figure.value)[:_MOST_BARS]
    drawn = [*own, *(bar_of(_settings(figure), figure, _OTHER, 1e9) for figure in ranked)]
    if direction in others.fio:
        drawn.insert(0, bar_of("fio, in `verify`", others.fio[direction][1], _FIO, 1e9))
    return bars(f"{direction}, GB/s: bytes of a block x requests in flight x threads (whiskers: interval)", drawn)


def _row(run: str, figure: Measurement, others: Beside) -> Mapping[str, Any]:
    given = figure.parameters
    fio = others.fio.get(str(given["direction"]))
    return {
        "run": run,
        "what": _words(figure),
        "block": format_size_binary(int(given["block_bytes"])),
        "block_bytes": int(given["block_bytes"]),
        "depth": given["queue_depth"],
        "threads": given["intra_op_parallelism"],
        "settings": _settings(figure).partition(", ")[2] or "-",
        "speed": number(figure.value / 1e9),
        "interval": interval_words(figure),
        "of_fio": f"{figure.value / fio[1].value:.2f}" if fio is not None and fio[1].value else "-",
        "own": run == _OWN,
    }
