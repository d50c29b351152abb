"""What `bench finetune` found, for people: where the time went on the ranks, and what binds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunetool.node.units import format_bandwidth, format_size
from tunetool.record import Measurement, Record
from tunetool.report.page import WIDTH, number, print_block
from tunetool.report.table import print_verdict_line

PREFIX = "finetune."
ROWS = (
    ("rendezvous", "processes start and meet"),
    ("imports", "libraries imported"),
    ("communicator", "communicator and first collective"),
    ("model_load", "model load"),
    ("engine", "engine start-up"),
    ("first_batch", "first batch"),
    ("data", "wait for a batch"),
    ("batch", "making a batch, waited for or not"),
    ("step", "step"),
    ("checkpoint", "checkpoint"),
    ("end_to_end", "end to end"),
)
_STARTS = ("rendezvous", "imports", "communicator", "model_load", "engine")
_HALF, _FIFTH = 0.5, 0.2


@dataclass(frozen=True)
class Shares:
    """Seconds of the slowest rank: before the first step, waiting for data, stepping."""

    start: Mapping[str, float]
    data: float
    step: float

    @property
    def all(self) -> float:
        """Together."""
        return sum(self.start.values()) + self.data + self.step


def figures(record: Record) -> dict[str, list[Measurement]]:
    """Measurements by their last name, in the order of ranks."""
    found: dict[str, list[Measurement]] = {}
    for each in record.measurements:
        if each.name.startswith(PREFIX):
            found.setdefault(each.name.removeprefix(PREFIX), []).append(each)
    return found


def print_finetune(record: Record, path: Path | None, console: Console) -> None:
    """One table, short sentences, the verdict."""
    found = figures(record)
    for line in _head(record):
        print_block(console, line, 2)
    if found:
        console.print(_table(found))
    for line in [*_sentences(found), *_checks(record)]:
        print_block(console, line, 2)
    if path is not None and (path.parent / "tensorboard").is_dir():
        # To be copied: never folded.
        console.print(Text(f"curves: tensorboard --logdir {path.parent / 'tensorboard'}"), soft_wrap=True)
    print_verdict_line(record, path, console)


def _head(record: Record) -> Iterator[str]:
    if not record.measurements:
        return
    told = record.measurements[0].parameters
    yield (
        f"{record.node.host}: `{told['model']}` ({_million(told['parameters'])} million parameters, "
        f"{_million(told['trainable'])} million trained: {told['tuning']}) on `{told['dataset']}`"
    )
    place = f"{told['ranks']} rank(s) on {told['nodes']} node(s) by `{told['launcher']}`, {told['compute']}"
    steps = f"{told['steps']} steps with {told['batch_size']} samples for each rank"
    yield f"{place}; {told['trainer']}, ZeRO-{told['zero_stage']}; {steps}"


def _table(found: Mapping[str, Sequence[Measurement]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, width=WIDTH, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    many = len(found.get("end_to_end", ())) > 1
    table.add_column("seconds" if not many else "seconds, on each rank", overflow="fold")
    table.add_column("median of ranks" if many else "", justify="right")
    if many:
        table.add_column("least", justify="right")
        table.add_column("most", justify="right")
        table.add_column("on", justify="right")
    for name, title in ROWS:
        ranks = found.get(name)
        if not ranks:
            continue
        cells = [title, _seconds(median(each.value for each in ranks))]
        if many:
            most = max(ranks, key=lambda each: each.value)
            cells += [_seconds(min(each.value for each in ranks)), _seconds(most.value), f"rank {most.rank}"]
        table.add_row(*map(Text, cells))
    return table


def _sentences(found: Mapping[str, Sequence[Measurement]]) -> Iterator[str]:
    steps = found.get("step")
    if steps:
        count = len(steps[0].samples or [])
        yield f"step, wait and making of a batch: medians of {count} steps, the first left out where there are more"
    loads = found.get("model_bandwidth")
    if loads:
        yield _load(loads)
    data = found.get("data")
    if data:
        yield _data(data)
    tokens, images = found.get("all.tokens"), found.get("all.images")
    if tokens and images:
        yield f"all ranks together: {number(tokens[0].value)} tokens/s, {number(images[0].value)} images/s"
    if steps:
        yield binds(shares(found))


def _load(loads: Sequence[Measurement]) -> str:
    slowest = min(loads, key=lambda each: each.value)
    size = format_size(float(slowest.parameters["model_bytes"]))
    stored = ", ".join(format_size(float(each.parameters.get("storage_read_bytes", 0))) for each in loads[:8])
    ranks = "rank" if len(loads) == 1 else f"each of {len(loads)} ranks"
    more = " ..." if len(loads) > 8 else ""
    rate = format_bandwidth(slowest.value)
    return (
        f"model load: {ranks} reads all {size} from {slowest.medium}, the slowest at {rate}; of it from drives: "
        f"{stored}{more}"
    )


def _data(data: Sequence[Measurement]) -> str:
    logical = sum(float(each.parameters.get("logical_read_bytes", 0)) for each in data)
    stored = sum(float(each.parameters.get("storage_read_bytes", 0)) for each in data)
    return f"data: {format_size(logical)} read from {data[0].medium}, of it {format_size(stored)} from drives"


def shares(found: Mapping[str, Sequence[Measurement]]) -> Shares:
    """Of the rank that takes longest."""
    slowest = max(found["end_to_end"], key=lambda each: each.value).rank

    def samples(name: str) -> list[float]:
        return next((list(each.samples or []) for each in found.get(name, ()) if each.rank == slowest), [])

    start = {name: sum(samples(name)) for name in _STARTS}
    return Shares(start, sum(samples("first_batch")) + sum(samples("data")), sum(samples("step")))


def binds(spent: Shares) -> str:
    """What a faster run would have to change first."""
    start, training = sum(spent.start.values()), spent.data + spent.step
    name = max(spent.start, key=lambda each: spent.start[each])
    title = dict(ROWS)[name]
    if start > _HALF * spent.all:
        return (
            f"what binds: the start. {_seconds(start)} of {_seconds(spent.all)} s pass before the first step, the most "
            f"in: {title} ({_seconds(spent.start[name])} s)"
        )
    share = spent.data / training if training else 0.0
    if share >= _FIFTH:
        return (
            f"what binds: data. Waiting for batches takes {share:.0%} of the training: faster storage, more loading "
            "processes (`--workers`), or images staged to memory"
        )
    waiting = f"Waiting for batches takes {share:.1%} of the training"
    return f"what binds: the step. {waiting}: faster storage would change little"


def _checks(record: Record) -> Iterator[str]:
    for check in record.checks:
        if check.id == f"{PREFIX}loss":
            yield f"loss: {check.found}"
        elif check.status in ("skip", "fail"):
            yield f"{check.id}: {check.found}"


def _million(count: float | str) -> str:
    return f"{float(count) / 1e6:,.4g}" if float(count) < 1e9 else f"{float(count) / 1e6:,.0f}"


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


__all__ = ["Shares", "binds", "figures", "print_finetune", "shares"]
