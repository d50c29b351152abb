"""The result of `bench loading` for people: a table for each state of the files, and which engine to use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunetool.bench.loading.figures import FIO, PINNED
from tunetool.bench.loading.samples import TITLES, State, title_of
from tunetool.node.units import format_bandwidth, format_size
from tunetool.record import CheckResult, Measurement, Record, chosen
from tunetool.report.engine_figures import EngineFigures, counted_by_drives, engine_checks, without_figures
from tunetool.report.page import add_number_columns, line_of, new_table, number, print_block
from tunetool.report.table import print_verdict_line


@dataclass
class Section:
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


def sections(record: Record) -> list[Section]:
    """The record's figures by state, number of GPUs and engine."""
    result = []
    labelled = [*(each.labels for each in record.measurements), *(check.labels for check in record.checks)]
    gpus = sorted({int(labels.get("gpus", "1")) for labels in labelled if "state" in labels})
    for state, count in ((state, count) for state in TITLES for count in gpus):
        wanted = {"state": state, **({"gpus": str(count)} if count > 1 else {})}
        section, by_engine = Section(state, count), dict[str, dict[str, Measurement]]()
        for each in chosen(record.measurements, **wanted):
            if int(each.labels.get("gpus", "1")) != count:
                continue
            if each.labels["engine"] == PINNED:
                section.pinned = each
            elif each.labels["engine"] == FIO:
                section.fio = each
            else:
                by_engine.setdefault(each.labels["engine"], {})[each.figure] = each
        checks = engine_checks(record, **wanted)
        known = {name: check for name, check in checks.items() if int(check.labels.get("gpus", "1")) == count}
        section.engines = [EngineFigures(name, figures, known.get(name)) for name, figures in by_engine.items()]
        section.left_out = [check for name, check in known.items() if name not in by_engine]
        if section.engines or section.left_out:
            result.append(section)
    return result


def print_loading(record: Record, path: Path | None, console: Console) -> None:
    """Print a table for each state with its notes and its advice, then the verdict. ``path``: where the record is."""
    console.print(line_of(f"{record.node.host}: `{record.target}`"))
    if record.measurements:
        parameters = record.measurements[0].parameters
        device = parameters.get("gpu") or parameters.get("device", "")
        size = format_size(float(parameters["model_bytes"]))
        print_block(console, f"`{parameters['model']}`, {size}, to {device}; torch {parameters['torch']}", 2)
    for section in sections(record):
        if section.measured:
            console.print(_table(section))
        for line in [*notes(section), *advice(section)]:
            print_block(console, line, 2)
    print_verdict_line(record, path, console)


def _table(section: Section) -> Table:
    table = new_table()
    table.add_column(section.title, overflow="fold")
    add_number_columns(table, "first s", "GB/s", "warm s", "GB/s", ceiling(section))
    table.add_column("equal")
    for engine in section.measured:
        table.add_row(*cells(section, engine))
    return table


def ceiling(section: Section) -> str:
    """The head of the column with the share of what can be reached."""
    return "of fio's read" if section.fio is not None else "of pinned copies"


def cells(section: Section, engine: EngineFigures) -> list[Text]:
    """The row of an engine."""
    share = engine.value("first_of_fio" if section.fio is not None else "warm_of_pinned")
    return [
        Text(engine.name),
        *(Text(_shown(engine.value(name), unit)) for name, unit in _COLUMNS),
        Text("-" if share is None else f"{share:.0%}"),
        Text("yes" if engine.is_equal else "NO", style="" if engine.is_equal else "bold red"),
    ]


_COLUMNS = (("first_time", 1.0), ("first", 1e9), ("warm_time", 1.0), ("warm", 1e9))


def _shown(value: float | None, unit: float) -> str:
    return "-" if value is None else number(value / unit)


def notes(section: Section) -> Iterator[str]:
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


def advice(section: Section) -> list[str]:
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
