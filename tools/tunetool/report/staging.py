"""The result of `bench staging` for people: published and measured times side by side, a summary, and advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunetool.bench.staging import published
from tunetool.bench.staging.published import SCENARIOS, TITLES, Pair, Scenario
from tunetool.node.units import format_bandwidth, format_size
from tunetool.record import CheckResult, Measurement, Record, chosen
from tunetool.report.finetune import computed
from tunetool.report.page import add_number_columns, line_of, new_table, print_block, print_verdict_line
from tunetool.view.text import number

_READ = ("model_read", "model_storage", "data_read", "data_storage")


@dataclass
class MeasuredScenario:
    """One scenario: figures by path and name, checks by the last part of their names."""

    name: Scenario
    figures: Mapping[tuple[str, str], Measurement]
    checks: Mapping[str, CheckResult]
    ranks: list[Measurement] = field(default_factory=list)
    """Model load of each rank on path B (bulk storage)."""

    def value(self, path: str, figure: str) -> float | None:
        """The median of a figure on ``path`` (``memory`` or ``bulk``); None where it was not measured."""
        measurement = self.figures.get((path, figure))
        return measurement.value if measurement else None

    def pair(self, figure: str) -> Pair | None:
        """The medians of both paths; None where one is missing."""
        staged, bulk = self.value("memory", figure), self.value("bulk", figure)
        return Pair(staged, bulk) if staged is not None and bulk is not None else None

    @property
    def any(self) -> Measurement | None:
        """Any figure, for the conditions that all of them share; None where nothing was measured."""
        return next(iter(self.figures.values()), None)

    @property
    def missing(self) -> str | None:
        """Why the scenario was not measured, or not completely; None where it was."""
        check = self.checks.get("")
        return check.found if check else None


def scenarios(record: Record) -> list[MeasuredScenario]:
    """The record's figures grouped by scenario, for the scenarios that it has."""
    result = []
    for name in SCENARIOS:
        figures: dict[tuple[str, str], Measurement] = {}
        ranks = []
        for each in chosen(record.measurements, subject="staging", scenario=name):
            if each.figure == "rank_model_load":
                ranks += [each] if each.labels["path"] == "bulk" else []
            elif each.figure == "speedup":
                figures["speedup", each.labels["phase"]] = each
            else:
                figures[each.labels["path"], each.figure] = each
        checks = {
            check.labels.get("check", ""): check for check in record.checks if check.labels.get("scenario") == name
        }
        if figures or checks:
            result.append(MeasuredScenario(name, figures, checks, ranks))
    return result


def print_staging(record: Record, path: Path | None, console: Console) -> None:
    """Print a table for each scenario, the summary, the advice and the verdict. ``path``: where the record is."""
    measured = scenarios(record)
    console.print(line_of(f"{record.node.host}: {record.target}"))
    for each in measured:
        if each.any is None:
            print_block(console, f"{TITLES[each.name]}: {_word(each)}, {each.missing or 'nothing was measured'}", 2)
            continue
        for line in head(each):
            print_block(console, line, 2)
        console.print(_table(each))
        for line in notes(each):
            print_block(console, line, 2)
    if any(each.any for each in measured):
        console.print(_summary(measured))
        for line in closing(measured):
            print_block(console, line, 2)
    if path is not None and (path.parent / "tensorboard").is_dir():
        # A command to copy, so that it is not folded.
        console.print(Text(f"curves: tensorboard --logdir {path.parent / 'tensorboard'}"), soft_wrap=True)
    print_verdict_line(record, path, console)


def _word(scenario: MeasuredScenario) -> str:
    check = scenario.checks.get("")
    return "left out" if check is not None and check.status == "skip" else "failed"


def head(scenario: MeasuredScenario) -> Iterator[str]:
    """The conditions of the measurement."""
    first = scenario.any
    if first is None:
        return
    parameters = first.parameters
    staged, bulk = scenario.figures.get(("memory", "end_to_end")), scenario.figures.get(("bulk", "end_to_end"))
    media = f"{staged.medium if staged else '-'} against {bulk.medium if bulk else '-'}"
    size, data_size = (format_size(float(parameters[f"{what}_bytes"])) for what in ("model", "data"))
    yield (
        f"{TITLES[scenario.name]}: {parameters['ranks']} rank(s) on {parameters['nodes']} node(s), "
        f"{computed(parameters, 'device')}; {media}; model `{parameters['model']}` of {size}, "
        f"{parameters['images']} images of {data_size}; {parameters['steps']} steps of "
        f"{parameters['steps_per_epoch']} in an epoch, ZeRO-{parameters['zero_stage']}, {first.engine}"
    )
    if scenario.missing:
        yield f"failed: {scenario.missing}"


def rows(scenario: MeasuredScenario) -> Iterator[tuple[str, Sequence[str]]]:
    """The table's rows: a title, then published memory and bulk, measured memory and bulk, and bulk / memory."""
    first = scenario.any
    parameters = first.parameters if first else {}
    full = scenario.name == "nodes"
    yield (
        "Epoch",
        ("10", "10", *_both(f"{_epochs(parameters):.3g}"), "")
        if full
        else ("", "", *_both(f"{_epochs(parameters):.3g}"), ""),
    )
    images = f"{parameters['images']} images"
    yield "Dataset", ("2000+ images", "2000+ images", *_both(images), "") if full else ("", "", *_both(images), "")
    yield (
        "Batch size",
        ("2", "2", *_both(str(parameters["batch_size"])), "")
        if full
        else ("", "", *_both(str(parameters["batch_size"])), ""),
    )
    yield "Data load time / batch", _cells(published.DATA_PER_BATCH.get(scenario.name), scenario.pair("data_per_batch"))
    yield "  of which steps waited", _cells(None, scenario.pair("data_wait_per_batch"))
    spread = scenario.pair("batch_spread")
    if spread:
        yield (
            "  spread of batches: 95th percentile / median",
            ("", "", f"{spread.staged:.2f}", f"{spread.bulk:.2f}", f"{spread.ratio:.2f}"),
        )
    yield "Model load time", _cells(published.MODEL_LOAD.get(scenario.name), scenario.pair("model_load"))
    yield (
        "First epoch" + (" (extrapolated)" if parameters["extrapolated"] else ""),
        _cells(None, scenario.pair("first_epoch")),
    )
    if scenario.pair("later_epoch"):
        yield "Later epoch", _cells(None, scenario.pair("later_epoch"))
    yield "Fine-tune time", _cells(published.FINE_TUNE.get(scenario.name), scenario.pair("fine_tune"))
    yield "  of which the first step's start-up", _cells(None, scenario.pair("first_step"))
    stage = scenario.value("memory", "stage")
    yield "Staging", ("", "", _seconds(stage), "-", "")
    yield "End to end, staging included", _cells(None, scenario.pair("end_to_end"))


def _both(text: str) -> tuple[str, str]:
    return text, text


def _epochs(parameters: Mapping[str, object]) -> float:
    return float(str(parameters["steps"])) / float(str(parameters["steps_per_epoch"]))


def _cells(theirs: Pair | None, ours: Pair | None) -> tuple[str, str, str, str, str]:
    before = (_seconds(theirs.staged), _seconds(theirs.bulk)) if theirs else ("", "")
    if ours is None:
        return (*before, "-", "-", "-")
    return (*before, _seconds(ours.staged), _seconds(ours.bulk), f"{ours.ratio:.2f}" if ours.staged > 0 else "-")


def _table(scenario: MeasuredScenario) -> Table:
    table = new_table()
    table.add_column(TITLES[scenario.name], overflow="fold")
    add_number_columns(table, "published /dev/shm", "published bulk", "memory", "bulk", "bulk/memory")
    for name, cells in rows(scenario):
        table.add_row(Text(name), *map(Text, cells))
    return table


def notes(scenario: MeasuredScenario) -> Iterator[str]:
    """Notes below the table: the speed of staging, the bytes that each rank read, and the checks."""
    stage, rate = scenario.figures.get(("memory", "stage")), scenario.figures.get(("memory", "stage_rate"))
    if stage is not None and rate is not None:
        yield f"staging: {stage.value:.2f} s at {format_bandwidth(rate.value)}, the slowest node"
    for rank in scenario.ranks:
        size = {name: format_size(float(rank.parameters[f"{name}_bytes"])) for name in _READ}
        yield (
            f"rank {rank.rank} on {rank.host}, path B, last round: model {size['model_read']}, "
            f"{size['model_storage']} of it from storage; data {size['data_read']}, {size['data_storage']} from storage"
        )
    for name in ("losses", "cold", "notes"):
        check = scenario.checks.get(name)
        if check is not None:
            yield f"{name}: {check.status.upper()}, {check.found}"


def summary(measured: Sequence[MeasuredScenario]) -> Iterator[Sequence[str]]:
    """The summary's rows: published and measured model load, and the gain end to end, for every scenario."""
    by_name = {each.name: each for each in measured}
    for name in SCENARIOS:
        theirs = published.MODEL_LOAD[name]
        scenario = by_name.get(name)
        load, whole = (scenario.pair("model_load"), scenario.pair("end_to_end")) if scenario else (None, None)
        yield (
            TITLES[name],
            f"{theirs.staged:g} / {theirs.bulk:g}",
            f"{theirs.ratio:.2f}",
            f"{_seconds(load.staged)} / {_seconds(load.bulk)}" if load else "-",
            f"{load.ratio:.2f}" if load else "-",
            f"{_seconds(whole.staged)} / {_seconds(whole.bulk)}" if whole else "-",
            f"{whole.ratio:.2f}" if whole else "-",
        )


def _summary(measured: Sequence[MeasuredScenario]) -> Table:
    table = new_table()
    table.add_column("memory / bulk, s", overflow="fold")
    add_number_columns(table, "published load", "x", "model load", "x", "end to end", "x")
    for cells in summary(measured):
        table.add_row(*map(Text, cells))
    return table


def closing(measured: Sequence[MeasuredScenario]) -> Iterator[str]:
    """The lines below the summary: the published source, remarks about it, sharding and advice."""
    yield f"published: {published.SOURCE}"
    yield from published.remarks()
    for name in ("sharding", "advice"):
        for each in measured:
            check = each.checks.get(name)
            if check is not None:
                yield f"{TITLES[each.name]}: {check.found}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 600:
        return f"{int(value // 3600)}:{int(value % 3600 // 60):02d}:{int(value % 60):02d}"
    return f"{number(value)} s"


__all__ = ["MeasuredScenario", "closing", "print_staging", "scenarios"]
