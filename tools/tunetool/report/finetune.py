"""The result of `bench finetune` for people: where the ranks spent their time, and the bottleneck."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunetool.advise.precision import computed
from tunetool.node.units import format_bandwidth, format_size
from tunetool.record import Measurement, Record, chosen
from tunetool.report.page import new_table, print_block
from tunetool.report.table import print_verdict_line
from tunetool.view.text import number

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


def print_finetune(record: Record, path: Path | None, console: Console) -> None:
    """Print a table of phases, notes, the bottleneck and the verdict. ``path``: where the record is."""
    by_name = figures(record)
    for line in _head(record):
        print_block(console, line, 2)
    if by_name:
        console.print(_table(by_name))
    for line in [*_sentences(by_name), *_checks(record)]:
        print_block(console, line, 2)
    if path is not None and (path.parent / "tensorboard").is_dir():
        # A command to copy, so that it is not folded.
        console.print(Text(f"curves: tensorboard --logdir {path.parent / 'tensorboard'}"), soft_wrap=True)
    print_verdict_line(record, path, console)


def _head(record: Record) -> Iterator[str]:
    if not record.measurements:
        return
    parameters = record.measurements[0].parameters
    yield (
        f"{record.node.host}: `{parameters['model']}` ({_million(parameters['parameters'])} million parameters, "
        f"{_million(parameters['trainable'])} million trained: {parameters['tuning']}) on `{parameters['dataset']}`"
    )
    ranks = f"{parameters['ranks']} rank(s) on {parameters['nodes']} node(s)"
    launch = f"started by `{parameters['launcher']}`, {computed(parameters, 'compute')}"
    steps = f"{parameters['steps']} steps with {parameters['batch_size']} samples for each rank"
    yield f"{ranks}, {launch}; {parameters['trainer']}, ZeRO-{parameters['zero_stage']}; {steps}"


def _table(by_name: Mapping[str, Sequence[Measurement]]) -> Table:
    table = new_table(gap=2)
    many = len(by_name.get("end_to_end", ())) > 1
    table.add_column("seconds" if not many else "seconds, on each rank", overflow="fold")
    table.add_column("median of ranks" if many else "", justify="right")
    if many:
        table.add_column("least", justify="right")
        table.add_column("most", justify="right")
        table.add_column("on", justify="right")
    for name, title in ROWS:
        ranks = by_name.get(name)
        if not ranks:
            continue
        cells = [title, _seconds(median(each.value for each in ranks))]
        if many:
            most = max(ranks, key=lambda each: each.value)
            cells += [_seconds(min(each.value for each in ranks)), _seconds(most.value), f"rank {most.rank}"]
        table.add_row(*map(Text, cells))
    return table


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
    if steps:
        yield binds(shares(by_name))


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


__all__ = ["Shares", "binds", "figures", "print_finetune", "shares"]
