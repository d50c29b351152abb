"""What `bench loading` shows: a table and bars for each state of the files, and which engine to use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.bench.loading.engines import DIRECT
from tunetool.bench.loading.figures import FIO, PINNED
from tunetool.bench.loading.samples import TITLES, State, title_of
from tunetool.node.units import format_bandwidth, format_count, format_size
from tunetool.record import CheckResult, Measurement, Record, chosen
from tunetool.view.engines import EngineFigures, counted_by_drives, engine_checks, equality, without_figures
from tunetool.view.model import Block, Cells, Notes, Plot, Section, Table, View
from tunetool.view.plots import Bar, bar_of, bars

_DIRECT, _OTHER, _CEILING = "#1f6feb", "#8c959f", "#2da44e"


@dataclass
class States:
    """All that was measured in one state, on so many GPUs at the same time."""

    state: State
    gpus: int = 1
    engines: list[EngineFigures] = field(default_factory=list)
    left_out: list[CheckResult] = field(default_factory=list)
    pinned: Measurement | None = None
    fio: Measurement | None = None

    @property
    def title(self) -> str:
        """For people."""
        return title_of(self.state, self.gpus)

    @property
    def measured(self) -> list[EngineFigures]:
        """Engines with a first load, the fastest first."""
        engines = [engine for engine in self.engines if engine.value("first")]
        return sorted(engines, key=lambda engine: -(engine.value("first") or 0.0))


def sections(record: Record) -> list[States]:
    """The record's figures by state, number of GPUs and engine."""
    result = []
    labelled = [*(each.labels for each in record.measurements), *(check.labels for check in record.checks)]
    gpus = sorted({int(labels.get("gpus", "1")) for labels in labelled if "state" in labels})
    for state, count in ((state, count) for state in TITLES for count in gpus):
        several = str(count) if count > 1 else None
        section, by_engine = States(state, count), dict[str, dict[str, Measurement]]()
        for each in chosen(record.measurements, state=state, gpus=several):
            if each.labels["engine"] == PINNED:
                section.pinned = each
            elif each.labels["engine"] == FIO:
                section.fio = each
            else:
                by_engine.setdefault(each.labels["engine"], {})[each.figure] = each
        known = engine_checks(record, state=state, gpus=several)
        section.engines = [EngineFigures(name, figures, known.get(name)) for name, figures in by_engine.items()]
        section.left_out = [check for name, check in known.items() if name not in by_engine]
        if section.engines or section.left_out:
            result.append(section)
    return result


def view(record: Record, directory: Path | None = None) -> View:
    """What is shown: a section for each state, and which engine to use."""
    known = sections(record)
    return View(
        f"Loading weights on {record.node.host}",
        head=list(_head(record)),
        sections=[Section(each.title, list(_blocks(each))) for each in known],
        advice=advice(known),
    )


def _head(record: Record) -> Iterator[str]:
    if record.measurements:
        parameters = record.measurements[0].parameters
        device = parameters.get("gpu") or parameters.get("device", "")
        size = format_size(float(parameters["model_bytes"]))
        yield f"`{parameters['model']}`, {size}, to {device}; torch {parameters['torch']}"
        if "gpu" in parameters and parameters.get("compiled") is False:  # older records do not say it
            yield (
                "`direct` read by Python: this tunetool lacks its compiled code, which `python -m "
                "tunetool.checkpoint.build_read_loop` adds where there is a C compiler"
            )


def _blocks(section: States) -> Iterator[Block]:
    for which, title in (("first", "first load of a process"), ("warm", "the next load")):
        if drawn := _bars(section, which):
            yield Plot(bars(f"{section.title}: {title}, GB/s", drawn))
    titles = ("engine", "first, s", "first, GB/s", "warm, s", "warm, GB/s", _ceiling(section), "equal")
    yield Table(titles, [_row(section, engine) for engine in section.measured], numbers=titles[1:-1])
    yield Notes(list(_notes(section)))


def _bars(section: States, which: str) -> list[Bar]:
    drawn = [
        bar_of(engine.name, engine.figures[which], _DIRECT if engine.name == DIRECT else _OTHER, 1e9)
        for engine in section.measured
        if which in engine.figures
    ]
    ceilings = (("copies from pinned memory", section.pinned), ("fio's read", section.fio))
    if drawn:
        drawn[:0] = [bar_of(name, figure, _CEILING, 1e9) for name, figure in ceilings if figure is not None]
    return drawn


def _ceiling(section: States) -> str:
    return "of fio's read" if section.fio is not None else "of pinned copies"


def _row(section: States, engine: EngineFigures) -> Cells:
    share = engine.value("first_of_fio" if section.fio is not None else "warm_of_pinned")
    return [
        engine.name,
        *(engine.shown(name, unit) for name, unit in _COLUMNS),
        "-" if share is None else f"{share:.0%}",
        equality(engine),
    ]


_COLUMNS = (("first_time", 1.0), ("first", 1e9), ("warm_time", 1.0), ("warm", 1e9))


def _notes(section: States) -> Iterator[str]:
    """Lines under the table: rounds, ceiling, evidence, what was left out or failed."""
    first = next((engine.figures["first"] for engine in section.measured), None)
    if first is not None:
        yield (
            f"medians of {len(first.samples or [])} rounds; first: in a fresh process, with the import of its library; "
            "warm: the next load of that process"
        )
    if section.pinned is not None:
        # Several share the reading: a GPU gets a part from its peers, by NVLink.
        limit = ", which no loader can exceed" if section.gpus == 1 else " into one GPU; those that share may exceed it"
        yield f"copies from pinned memory: {format_bandwidth(section.pinned.value)}{limit}"
    if section.fio is not None:
        yield f"fio's read of the same files, past the page cache: {format_bandwidth(section.fio.value)}"
    yield from counted_by_drives(section.measured, "first", "read")
    yield from without_figures(section.engines, section.left_out)


def advice(known: Sequence[States]) -> list[str]:
    """A sentence for each number of GPUs and state: which engine to use there, as far as the rounds decide it.

    None where fewer than two engines gave the files' bytes.
    """
    return [line for each in sorted(known, key=lambda each: each.gpus) for line in _advice(each)]


def _advice(section: States) -> list[str]:
    """By the first load, since people load a model once in a process."""
    good = [engine for engine in section.measured if engine.is_equal]
    if len(good) < 2:
        return []
    where = f"{_count(section.gpus, good[0])}, {TITLES[section.state]}"
    best, *rivals = _fastest(good, "first")
    if rivals:
        names = " and ".join(f"`{each.name}`" for each in (best, *rivals))
        slower = [f"`{each.name}`" for each in good if each is not best and each not in rivals]
        behind = f"; {', '.join(slower)}: slower" if slower else ""
        return [f"{where}: no difference was decided between {names} at the first load of a process{behind}"]
    compared = best.figures["first_versus_best_other"]
    interval = compared.confidence
    spread = f" ({interval.low:.2f} to {interval.high:.2f})" if interval else ""
    warm = _fastest([engine for engine in good if engine.value("warm")], "warm")
    other = f"; for the next loads `{warm[0].name}`" if len(warm) == 1 and warm[0] is not best else ""
    return [
        f"{where}: use `{best.name}`, {format_bandwidth(best.value('first') or 0.0)} at the first load of a process, "
        f"{compared.value:.2f} times `{compared.parameters['against']}`{spread}{other}"
    ]


def _fastest(engines: Sequence[EngineFigures], which: str) -> list[EngineFigures]:
    """The fastest, and those from which the rounds do not tell it apart: to each of the others that one is the fastest
    other, to itself it is the second."""
    ordered = sorted(engines, key=lambda engine: -(engine.value(which) or 0.0))
    ratios = [engine.figures.get(f"{which}_versus_best_other") for engine in ordered]
    is_open = [each is None or not each.parameters["decided"] for each in ratios]
    if is_open[:1] == [True]:
        is_open[1:2] = [True]
    return [engine for place, engine in enumerate(ordered) if place == 0 or is_open[place]]


def _count(gpus: int, engine: EngineFigures) -> str:
    if engine.figures["first"].parameters.get("gpu"):
        return format_count(gpus, "GPU")
    return "1 process" if gpus == 1 else f"{gpus} processes"
