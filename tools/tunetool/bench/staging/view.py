"""What `bench staging` shows: published and measured times side by side, a summary, and advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.advise.precision import computed
from tunetool.bench.staging import published
from tunetool.bench.staging.published import SCENARIOS, TITLES, Pair, Scenario
from tunetool.node.units import format_bandwidth, format_size
from tunetool.record import CheckResult, Measurement, Record, chosen
from tunetool.training.rank.curve_files import opening_line
from tunetool.view.figures import has_reasons
from tunetool.view.model import Block, Cells, Notes, Plot, Section, Table, Verbatim, View
from tunetool.view.plots import bar_of, bars
from tunetool.view.text import number

_COLUMNS = ("what", "published /dev/shm", "published bulk", "memory", "bulk", "bulk/memory")
_SUMMARY = ("scenario", "published load", "x", "model load", "x", "end to end", "x")
_PLOTS: Mapping[str, str] = {
    "model_load": "model load, s",
    "data_per_batch": "data load of a batch, s",
    "first_epoch": "first epoch, s",
    "end_to_end": "end to end, staging included, s",
}
_COLOURS = {"memory": "#1f6feb", "bulk": "#8c959f"}
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


def view(record: Record, directory: Path | None = None) -> View:
    """What is shown: a section for each scenario, and one across them."""
    known = scenarios(record)
    measured = [each for each in known if each.any is not None]
    on = "" if measured else "terminal"
    sections = [Section(TITLES[each.name], list(_blocks(each)), on) for each in known]
    if measured:
        sections.append(Section("Across scenarios: memory / bulk, s", list(_across(measured, directory))))
    return View(
        f"Staging on {record.node.host}",
        sections=sections,
        advice=list(_found(measured, "advice")),
        checks=not measured and has_reasons(record),
    )


def _blocks(scenario: MeasuredScenario) -> Iterator[Block]:
    title = TITLES[scenario.name]
    if scenario.any is None:
        check = scenario.checks.get("")
        word = "left out" if check is not None and check.status == "skip" else "failed"
        yield Notes([f"{title}: {word}, {scenario.missing or 'nothing was measured'}"])
        return
    yield Notes(list(_head(scenario)))
    yield Table(_COLUMNS, [[name, *cells] for name, cells in _rows(scenario)], sortable=False)
    yield Notes(list(_notes(scenario)))
    for figure, words in _PLOTS.items():
        pair = [(path, colour, scenario.figures.get((path, figure))) for path, colour in _COLOURS.items()]
        drawn = [bar_of(f"{path} ({each.medium})", each, colour) for path, colour, each in pair if each is not None]
        yield Plot(bars(f"{title}: {words}", drawn))


def _across(measured: Sequence[MeasuredScenario], directory: Path | None) -> Iterator[Block]:
    yield Table(_SUMMARY, list(_summary(measured)), sortable=False)
    yield Notes([f"published: {published.SOURCE}", *published.remarks(), *_found(measured, "sharding")])
    if directory is not None and (command := opening_line(directory)):
        yield Verbatim(f"curves: {command}", on="terminal")


def _found(measured: Sequence[MeasuredScenario], name: str) -> Iterator[str]:
    """What the checks of this name say."""
    for each in measured:
        if (check := each.checks.get(name)) is not None:
            yield f"{TITLES[each.name]}: {check.found}"


def _head(scenario: MeasuredScenario) -> Iterator[str]:
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


def _rows(scenario: MeasuredScenario) -> Iterator[tuple[str, Sequence[str]]]:
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


def _notes(scenario: MeasuredScenario) -> Iterator[str]:
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


def _summary(measured: Sequence[MeasuredScenario]) -> Iterator[Cells]:
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


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 600:
        return f"{int(value // 3600)}:{int(value % 3600 // 60):02d}:{int(value % 60):02d}"
    return f"{number(value)} s"
