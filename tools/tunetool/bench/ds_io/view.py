"""What `bench ds-io` shows: its figures in the format of DeepSpeed's `ds_io`, beside other settings and fio."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.bench.ds_io.request import DURABLE, KIND
from tunetool.measure import Direction
from tunetool.measure.figures import sequential_figures
from tunetool.node.units import format_bandwidth, format_size_binary
from tunetool.record import Measurement, Record, chosen, newest_beside
from tunetool.tune.settings import AioSettings
from tunetool.view.figures import ceiling_of, what_limits
from tunetool.view.model import Block, Cell, Cells, Notes, Plot, Section, Table, View
from tunetool.view.plots import bar_of, bars
from tunetool.view.text import interval_of, interval_words, number

_THIS, _OTHER, _FIO = "#1f6feb", "#8c959f", "#2da44e"
_MOST_RUNS, _MOST_VERIFIED = 60, 10
"""Records that are read to find what may be held against this one: the newest."""
_MOST_BARS = 24
_OWN = "this run"
_TITLES = ("run", "direction", "block", "depth", "threads", "flags", "GB/s", "of fio's", "interval")
_NUMBERS = ("block", "depth", "threads", "GB/s", "of fio's")
_TIMED = (
    "a write is timed until the handle's `wait` returns, as DeepSpeed's `ds_io` does; synced: until the file was on "
    "the drives"
)
_OTHER_TIMES = (
    "other runs come from the records beside this one, about the same storage of the same machine; they were measured "
    "at other times: what is near is not decided; `tunetool tune` compares settings in turns"
)
_SHAPE = ("block_bytes", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events")
_DIRECTIONS: tuple[Direction, ...] = ("read", "write")


@dataclass(frozen=True)
class Beside:
    """Figures of other records about the same storage of the same machine."""

    runs: Sequence[tuple[str, Measurement]] = ()
    """Of other runs of the handle, the newest first; each with the name of its record."""
    fio: Mapping[str, tuple[str, Measurement]] = field(default_factory=dict)
    """By direction, what fio reached in the newest `verify`."""
    looked: bool = False
    """Whether it is known what lies there."""


def view(record: Record, directory: Path | None = None) -> View:
    """What is shown. The records beside ``directory`` are held against this one."""
    figures = figures_of(record)
    others = _beside(record, figures, directory.parent) if figures and directory is not None else Beside()
    return View(
        f"DeepSpeed's I/O handle on {record.node.host}",
        head=[*map(_line, figures), *map(_how, figures[:1])],
        sections=[Section("Figures", list(_blocks(figures, others)), on="page")] if figures else [],
        advice=list(_limits(record, figures, others)),
        checks=True,
    )


def figures_of(record: Record) -> list[Measurement]:
    """What the handle reached; not the ceiling of the links."""
    return chosen(record.measurements, subject="ds_io")


def _line(figure: Measurement) -> str:
    words = " Speed, synced" if figure.figure == DURABLE else " Speed"
    interval, count = figure.confidence, len(figure.samples or [])
    spread = f", {interval.low / 1e9:.4g} to {interval.high / 1e9:.4g} in {count} loops" if interval else ""
    return f"{figure.labels['direction'].capitalize()}{words} = {format_bandwidth(figure.value)}{spread}"


def _how(figure: Measurement) -> str:
    given, evidence = figure.parameters, figure.evidence
    proof = f"evidence: {evidence.kind} {evidence.ratio:.4f}" if evidence and evidence.ratio else "evidence: none"
    return (
        f"{figure.engine}; {format_size_binary(float(given['file_bytes']))} on {figure.medium}, "
        f"blocks of {format_size_binary(float(given['block_bytes']))}, depth {given['queue_depth']}, "
        f"parallel {given['intra_op_parallelism']}; {proof}"
    )


def _blocks(figures: Sequence[Measurement], others: Beside) -> Iterator[Block]:
    every = [*((_OWN, figure) for figure in figures), *others.runs]
    for direction in _DIRECTIONS:
        if picture := _picture(direction, every, others):
            yield Plot(picture)
    yield Table(_TITLES, [_row(run, figure, others) for run, figure in every], numbers=_NUMBERS)
    yield Notes([*_fio(others), _TIMED, *([_OTHER_TIMES] if others.runs else [])])


def _fio(others: Beside) -> list[str]:
    found = [
        f"{direction}: {figure.engine}: {number(figure.value / 1e9)} GB/s ({interval_words(figure)}), from {run}"
        for direction, (run, figure) in others.fio.items()
    ]
    none = ["fio: no record of `tunetool verify` for this storage lies beside this one"]
    return found or (none if others.looked else [])


def _beside(record: Record, own: Sequence[Measurement], runs_dir: Path) -> Beside:
    """What the records beside this one say of the same storage."""
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
    return Beside(runs, fio, looked=True)


def _is_whole(figure: Measurement) -> bool:
    """Whether a record of another version says how it was measured."""
    numbers = [figure.parameters.get(name) for name in _SHAPE]
    return "device" in figure.parameters and all(isinstance(number, int) for number in numbers)


def _same_storage(one: Measurement, other: Measurement) -> bool:
    counted = [each.evidence.device if each.evidence else None for each in (one, other)]
    return one.medium == other.medium and (None in counted or counted[0] == counted[1])


def _limits(record: Record, figures: Sequence[Measurement], others: Beside) -> Iterator[str]:
    ceiling = ceiling_of(record)
    for figure in figures:
        direction = figure.labels["direction"]
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
        elif others.looked:
            yield f"{_words(figure)}: not known: no record of `tunetool verify` for this storage lies beside this one"


def _ends(figure: Measurement) -> tuple[float, float]:
    interval = interval_of(figure)
    return (interval.low, interval.high) if interval else (figure.value, figure.value)


def _words(figure: Measurement) -> str:
    return f"{figure.labels['direction']}{', synced' if figure.figure == DURABLE else ''}"


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
    sides = [(run, figure) for run, figure in every if figure.labels["direction"] == direction]
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


def _row(run: str, figure: Measurement, others: Beside) -> Cells:
    given = figure.parameters
    _, fio = others.fio.get(figure.labels["direction"], ("", None))
    size = int(given["block_bytes"])
    return [
        run,
        _words(figure),
        Cell(format_size_binary(size), number=size),
        str(given["queue_depth"]),
        str(given["intra_op_parallelism"]),
        _settings(figure).partition(", ")[2] or "-",
        number(figure.value / 1e9),
        f"{figure.value / fio.value:.2f}" if fio is not None and fio.value else "-",
        interval_words(figure),
    ]
