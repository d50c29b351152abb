"""What `bench finetune` shows: where the ranks spent their time, the bottleneck, and the curves of every worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from tunetool.advise.precision import computed
from tunetool.bench.finetune.curves import sections_of
from tunetool.node.units import format_bandwidth, format_size
from tunetool.record import Measurement, Record, chosen
from tunetool.training.rank.curve_files import EVENTS, opening_line
from tunetool.view.model import Block, Cell, Notes, Section, Table, Verbatim, View
from tunetool.view.text import format_value, number

ROWS = (
    ("rendezvous", "processes start and meet"),
    ("imports", "libraries imported"),
    ("communicator", "communicator and first collective"),
    ("model_load", "model load"),
    ("engine", "engine start-up"),
    ("start", "LLaMA-Factory outside of its training"),
    ("first_batch", "first batch"),
    ("data", "wait for a batch"),
    ("batch", "preparing a batch, in parallel or not"),
    ("step", "step"),
    ("checkpoint", "checkpoint"),
    ("end_to_end", "end to end"),
)
_STARTS = ("rendezvous", "imports", "communicator", "model_load", "engine", "start")
_HALF, _FIFTH = 0.5, 0.2


@dataclass(frozen=True)
class Shares:
    """Seconds that the slowest rank spent before its first step (by phase), waiting for data, and in steps."""

    start: Mapping[str, float]
    data: float | None
    """None where nobody says it: LLaMA-Factory's steps include it."""
    step: float

    @property
    def all(self) -> float:
        """Seconds of all parts together."""
        return sum(self.start.values()) + (self.data or 0.0) + self.step


def figures(record: Record) -> dict[str, list[Measurement]]:
    """The measurements by figure, each in the order of ranks; those of all ranks together begin with `all.`."""
    by_name: dict[str, list[Measurement]] = {}
    for each in chosen(record.measurements, subject="finetune"):
        by_name.setdefault(f"all.{each.figure}" if "ranks" in each.labels else each.figure, []).append(each)
    return by_name


def view(record: Record, directory: Path | None = None) -> View:
    """What is shown; its curves raise ``UsageProblem`` where a file of them lies outside of ``directory``."""
    by_name = figures(record)
    sections = [
        Section("phases", list(_phases(by_name, directory))),
        Section("Figures", list(_all(record)), on="page"),
    ]
    return View(
        f"Finetune on {record.node.host}",
        head=list(_head(record)),
        sections=[each for each in sections if each.blocks],
        curves=partial(sections_of, record, directory) if directory is not None else tuple,
        advice=[binds(shares(by_name))] if "step" in by_name else [],
        closing=list(_checks(record)),
    )


def _phases(by_name: Mapping[str, Sequence[Measurement]], directory: Path | None) -> Iterator[Block]:
    if (table := _table(by_name)).rows:
        yield table
    if lines := list(_sentences(by_name)):
        yield Notes(lines)
    if directory is not None and (command := opening_line(directory)):
        there = f"the same curves in TensorBoard: `tensorboard --logdir {EVENTS}`, run in the directory of this page"
        yield Notes([there], on="page")
        yield Verbatim(f"curves: {command}", on="terminal")


def _all(record: Record) -> Iterator[Block]:
    rows = [
        (
            each.name,
            Cell(format_value(each.value, each.unit), number=each.value),
            _where(each),
            each.engine,
            each.medium,
        )
        for each in record.measurements
    ]
    if rows:
        yield Table(("figure", "value", "where", "engine", "medium"), rows, ("value",))


def _where(figure: Measurement) -> str:
    rank = f"rank {figure.rank}" if figure.rank is not None else ""
    return " on ".join(part for part in (rank, figure.host) if part)


def _head(record: Record) -> Iterator[str]:
    if not record.measurements:
        return
    parameters = record.measurements[0].parameters
    yield (
        f"`{parameters['model']}` ({_million(parameters['parameters'])} million parameters, "
        f"{_million(parameters['trainable'])} million trained: {parameters['tuning']}) on `{parameters['dataset']}`"
    )
    ranks = f"{parameters['ranks']} rank(s) on {parameters['nodes']} node(s)"
    launch = f"started by `{parameters['launcher']}`, {computed(parameters, 'compute')}"
    steps = f"{parameters['steps']} steps with {parameters['batch_size']} samples for each rank"
    yield f"{ranks}, {launch}; {parameters['trainer']}, ZeRO-{parameters['zero_stage']}; {steps}"


def _table(by_name: Mapping[str, Sequence[Measurement]]) -> Table:
    many = len(by_name.get("end_to_end", ())) > 1
    rows = []
    for name, title in ROWS:
        ranks = by_name.get(name)
        if not ranks:
            continue
        cells = [title, _seconds(median(each.value for each in ranks))]
        if many:
            most = max(ranks, key=lambda each: each.value)
            cells += [_seconds(min(each.value for each in ranks)), _seconds(most.value), f"rank {most.rank}"]
        rows.append(cells)
    return Table(("phase", *(("median of ranks, s", "least, s", "most, s", "on") if many else ("time, s",))), rows)


def _sentences(by_name: Mapping[str, Sequence[Measurement]]) -> Iterator[str]:
    steps = by_name.get("step")
    if steps:
        count = len(steps[0].samples or [])
        yield f"step, wait for a batch, preparing a batch: medians of {count} steps, without the first of several"
    loads = by_name.get("model_bandwidth")
    if loads:
        yield _load(loads)
    data = by_name.get("data")
    if data:
        yield _data(data)
    tokens, images = by_name.get("all.tokens"), by_name.get("all.images")
    if tokens and images:
        yield f"all ranks together: {number(tokens[0].value)} tokens/s, {number(images[0].value)} images/s"


def _load(loads: Sequence[Measurement]) -> str:
    slowest = min(loads, key=lambda each: each.value)
    size = format_size(float(slowest.parameters["model_bytes"]))
    stored = ", ".join(format_size(float(each.parameters.get("storage_read_bytes", 0))) for each in loads[:8])
    ranks = "rank" if len(loads) == 1 else f"each of {len(loads)} ranks"
    more = " ..." if len(loads) > 8 else ""
    rate = format_bandwidth(slowest.value)
    return (
        f"model load: {ranks} reads all {size} from {slowest.medium}, the slowest at {rate}; drives read {stored}{more}"
    )


def _data(data: Sequence[Measurement]) -> str:
    logical = sum(float(each.parameters.get("logical_read_bytes", 0)) for each in data)
    stored = sum(float(each.parameters.get("storage_read_bytes", 0)) for each in data)
    return f"data: {format_size(logical)} read from {data[0].medium}, {format_size(stored)} of it from drives"


def shares(by_name: Mapping[str, Sequence[Measurement]]) -> Shares:
    """The time shares of the rank that takes longest end to end."""
    slowest = max(by_name["end_to_end"], key=lambda each: each.value).rank

    def samples(name: str) -> list[float]:
        return next((list(each.samples or []) for each in by_name.get(name, ()) if each.rank == slowest), [])

    start = {name: sum(samples(name)) for name in _STARTS}
    data = sum(samples("first_batch")) + sum(samples("data")) if samples("data") else None
    return Shares(start, data, sum(samples("step")))


def binds(spent: Shares) -> str:
    """The bottleneck: the start, the data or the step, with the figures that show it."""
    start = sum(spent.start.values())
    name = max(spent.start, key=lambda each: spent.start[each])
    title = dict(ROWS)[name]
    if start > _HALF * spent.all:
        return (
            f"bottleneck: the start. {_seconds(start)} of {_seconds(spent.all)} s pass before the first step, most of "
            f"them in: {title} ({_seconds(spent.start[name])} s)"
        )
    if spent.data is None:
        return "bottleneck: the step; how long it waited for batches is not known"
    training = spent.data + spent.step
    share = spent.data / training if training else 0.0
    if share >= _FIFTH:
        return (
            f"bottleneck: data. Waiting for batches takes {share:.0%} of the training: use faster storage, more "
            "loading processes (`--workers`), or images staged to memory"
        )
    waiting = f"Waiting for batches takes {share:.1%} of the training"
    return f"bottleneck: the step. {waiting}: faster storage would change little"


def _checks(record: Record) -> Iterator[str]:
    for check in record.checks:
        if check.id == "finetune.loss":
            yield f"loss: {check.found}"
        elif check.status in ("skip", "fail"):
            yield f"{check.id}: {check.found}"


def _million(count: float | str) -> str:
    return f"{float(count) / 1e6:,.4g}" if float(count) < 1e9 else f"{float(count) / 1e6:,.0f}"


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"
