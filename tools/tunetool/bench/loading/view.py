"""What `bench loading` shows: a table and bars for each state of the files, and which engine to use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.bench.loading.engines import DIRECT
from tunetool.bench.loading.figures import FIO, PINNED
from tunetool.bench.loading.samples import TITLES, State, title_of
from tunetool.node.units import format_bandwidth, format_size
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
        advice=[line for each in known for line in advice(each)],
    )


def _head(record: Record) -> Iterator[str]:
    if record.measurements:
        parameters = record.measurements[0].parameters
        device = parameters.get("gpu") or parameters.get("device", "")
        size = format_size(float(parameters["model_bytes"]))
        yield f"`{parameters['model']}`, {size}, to {device}; torch {parameters['torch']}"


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
        yield f"copies from pinned memory: {format_bandwidth(section.pinned.value)}, which no loader can exceed"
    if section.fio is not None:
        yield f"fio's read of the same files, past the page cache: {format_bandwidth(section.fio.value)}"
    yield from counted_by_drives(section.measured, "first", "read")
    yield from without_figures(section.engines, section.left_out)


def advice(section: States) -> list[str]:
    """The sentence which engine to use in this state, by the first load, since people load a model once in a process.

    Empty where fewer than two engines gave the files' bytes.
    """
    good = [engine for engine in section.measured if engine.is_equal]
    if len(good) < 2:
        return []
    best, second = good[:2]
    compared = best.figures.get("first_versus_best_other")
    if compared is None or not compared.parameters["decided"]:
        return [f"{section.title}: `{best.name}` or `{second.name}`; these rounds do not decide which is faster"]
    interval = compared.confidence
    spread = f" ({interval.low:.2f} to {interval.high:.2f})" if interval else ""
    return [
        f"{section.title}: use `{best.name}`, {format_bandwidth(best.value('first') or 0.0)} at the first load of a "
        f"process, {compared.value:.2f} times `{compared.parameters['against']}`{spread}"
    ]
