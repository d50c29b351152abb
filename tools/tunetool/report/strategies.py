"""What `bench strategies` found, for people: prediction beside measurement, the networks, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunetool.node.units import format_bandwidth, format_size
from tunetool.record import Measurement, Record, Scalar
from tunetool.report.page import WIDTH, number, print_block
from tunetool.report.table import print_verdict_line

PREFIX = "strategies."
_PHASES = ("rendezvous", "imports", "communicator", "model_load", "engine")
_DEAR, _CHEAP = 1.25, 1.1
"""ZeRO-3 over a lower stage: worth a warning from the first on, nothing to speak of below the second."""
_ROOM = 0.8
"""Of a rank's memory that weights, gradients and states may take: activations need the rest."""
_POOR = 0.7
"""Scaling efficiency below which more nodes are hardly worth it."""


@dataclass(frozen=True)
class Ran:
    """A cell with its figures, by the last part of their names."""

    name: str
    figures: Mapping[str, Measurement]

    @property
    def step(self) -> Measurement:
        """Its step."""
        return self.figures["step"]

    @property
    def told(self) -> Mapping[str, Scalar]:
        """What the step was taken under."""
        return self.step.parameters

    def number(self, name: str) -> float:
        """One of those, as a number; 0 where it is not there."""
        return float(self.told.get(name, 0.0))

    @property
    def layout(self) -> tuple[int, int]:
        """Nodes, ranks of each."""
        return int(self.number("nodes")), int(self.number("ranks"))

    @property
    def stage(self) -> int:
        """Of ZeRO."""
        return int(self.number("zero_stage"))


def cells(record: Record) -> list[Ran]:
    """In the order in which they ran."""
    found: dict[str, dict[str, Measurement]] = {}
    for each in record.measurements:
        name = each.name.removeprefix(PREFIX)
        if "zero_stage" in each.parameters:
            what, _, layout = name.rpartition(".")[0].rpartition(".")
            found.setdefault(f"{layout}:{name.rpartition('.')[2]}", {})[what] = each
    return [Ran(name, figures) for name, figures in found.items() if "step" in figures]


def networks(record: Record) -> dict[str, dict[str, Measurement]]:
    """By layout, then by figure."""
    found: dict[str, dict[str, Measurement]] = {}
    for each in record.measurements:
        name = each.name.removeprefix(PREFIX)
        if name.startswith("network."):
            _, layout, figure = name.split(".", 2)
            found.setdefault(layout, {})[figure] = each
    return found


def print_strategies(record: Record, path: Path | None, console: Console) -> None:
    """Two tables, what to do, the verdict."""
    ran, links = cells(record), networks(record)
    for line in _head(record, ran):
        print_block(console, line, 2)
    if ran:
        console.print(_table(ran))
        for line in _notes(ran):
            print_block(console, line, 2)
    if any("latency" in figures for figures in links.values()):
        console.print()
        console.print(_network_table(links))
        print_block(console, "algorithm and bus bandwidth as nccl-tests define them; latency of one number", 2)
    for check in record.checks:
        if check.status != "pass":
            print_block(console, f"{check.id.removeprefix(PREFIX)}: {_word(check.status)}, {check.found}", 2)
    for line in advice(record):
        print_block(console, line, 2)
    print_verdict_line(record, path, console)


def _word(status: str) -> str:
    return {"skip": "left out", "fail": "FAIL", "unknown": "not known"}[status]


def _head(record: Record, ran: Sequence[Ran]) -> Iterator[str]:
    if not ran:
        return
    told = ran[0].told
    million = f"{float(told['parameters']) / 1e6:.1f} million parameters, {float(told['trained']) / 1e6:.2f} trained"
    place = f"by `{told['launcher']}`, {told['compute']}"
    yield f"{record.node.host}: `{told['model']}` ({million}: {told['tuning']}), {place}"
    rounds = max(len(each.step.samples or []) for each in ran)
    yield (
        f"{told['batch_size']} samples for each rank in a step; medians of {rounds} round(s) of {told['steps']} steps, "
        "the first two left out"
    )


def _table(ran: Sequence[Ran]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, width=WIDTH, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("nodes x ranks")
    for title in ("step, s", "predicted", "error", "sent/step", "calls", "epoch, x 1x1", "efficiency", "start, s"):
        table.add_column(title, justify="right")
    for each in ran:
        predicted = each.told.get("predicted_seconds")
        calls = sum(int(each.number(f"{kind}_calls")) for kind in ("all_reduce", "all_gather", "reduce_scatter"))
        row = [
            each.name,
            number(each.step.value),
            number(float(predicted)) if predicted is not None else "-",
            f"{each.number('prediction_error'):+.0%}" if predicted is not None else "-",
            format_size(round(each.number("sent_bytes"))),
            str(calls),
            _of(each, "versus_alone"),
            _of(each, "efficiency"),
            _of(each, "start"),
        ]
        table.add_row(*map(Text, row))
    return table


def _of(each: Ran, figure: str) -> str:
    found = each.figures.get(figure)
    return number(found.value) if found is not None else "-"


def _notes(ran: Sequence[Ran]) -> Iterator[str]:
    yield (
        "epoch, x 1x1: time for the same samples, of one rank alone; efficiency: of N times one rank's speed; start: "
        "processes, imports, communicator, model and engine, not in the step"
    )
    for each in ran:
        basis = each.told.get("prediction_basis")
        if basis is not None:
            waits = number(each.number("predicted_waiting_seconds"))
            yield f"{each.name}: predicted with {waits} s of waiting; computation: {basis}"


def _network_table(links: Mapping[str, Mapping[str, Measurement]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, width=WIDTH, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("network, GB/s")
    for title in ("latency, ms", "all-reduce", "bus", "all-gather", "bus", "reduce-scatter", "bus"):
        table.add_column(title, justify="right")
    for layout, figures in links.items():
        if "latency" not in figures:
            continue
        row = [f"{layout} {figures['latency'].parameters['backend']}", number(figures["latency"].value * 1e3)]
        for kind in ("all_reduce", "all_gather", "reduce_scatter"):
            for rate in ("algorithm", "bus"):
                found = figures.get(f"{kind}.{rate}_bandwidth")
                row.append(number(found.value / 1e9) if found is not None else "-")
        table.add_row(*map(Text, row))
    return table


def advice(record: Record) -> list[str]:
    """What follows for the user, in sentences."""
    ran, links = cells(record), networks(record)
    lines = [line for each in ran if each.stage == 3 for line in _stage3(each, ran, links)]
    lines += _scaling(ran)
    return lines


def _stage3(third: Ran, ran: Sequence[Ran], links: Mapping[str, Mapping[str, Measurement]]) -> Iterator[str]:
    beside = [each for each in ran if each.layout == third.layout and each.stage in (1, 2)]
    if not beside or third.layout == (1, 1):
        return
    other = max(beside, key=lambda each: each.stage)
    times = third.step.value / other.step.value
    place = f"on {_place(third)}"
    fits = other.number("state_bytes") <= _ROOM * other.number("memory_bytes")
    needed = (
        f"ZeRO-{other.stage} needs {format_size(round(other.number('state_bytes')))} on each rank before activations, "
        f"of {format_size(round(other.number('memory_bytes')))}"
    )
    if times < _CHEAP:
        yield (
            f"ZeRO-3 {place} costs nothing to speak of ({times:.2f}x of ZeRO-{other.stage}): take it where memory is "
            f"short; {needed}"
        )
        return
    if times < _DEAR:
        yield f"ZeRO-3 {place} costs {times:.2f}x of ZeRO-{other.stage}; {needed}"
        return
    link = _link(third, links)
    if fits:
        yield f"ZeRO-3 {place} costs {times:.1f}x of ZeRO-{other.stage}: use ZeRO-{other.stage}{link}; {needed}"
    else:
        yield f"ZeRO-3 {place} costs {times:.1f}x of ZeRO-{other.stage}, which does not fit: {needed}{link}"


def _link(third: Ran, links: Mapping[str, Mapping[str, Measurement]]) -> str:
    """Whether the network is what it waits for, and what it would need."""
    waiting, predicted = third.number("predicted_waiting_seconds"), third.number("predicted_seconds")
    gather = links.get(third.name.partition(":")[0], {}).get("all_gather.bus_bandwidth")
    if gather is None or waiting < 0.2 * predicted:
        return "; it is not the network that it waits for, but its own hooks around each module"
    compute = third.number("predicted_compute_seconds")
    sent = third.number("sent_bytes")
    enough = sent / compute if compute else float("inf")
    if enough <= gather.value:
        return "; what it waits for is latency, of many small collectives, not bandwidth"
    return (
        f" or fix the link: each rank sends {format_size(round(sent))} in a step at {format_bandwidth(gather.value)}, "
        f"and from {format_bandwidth(enough)} on it could hide behind the computation"
    )


def _scaling(ran: Sequence[Ran]) -> Iterator[str]:
    """Whether more nodes were worth it."""
    for each in ran:
        nodes, ranks = each.layout
        if nodes == 1:
            continue
        one = next((other for other in ran if other.layout == (1, ranks) and other.stage == each.stage), None)
        if one is None:
            continue
        gain = one.step.value * nodes / each.step.value
        if gain < _POOR * nodes:
            yield (
                f"{nodes} nodes train {gain:.2f} times as fast as one under ZeRO-{each.stage}, with {ranks} rank(s) "
                f"each" + (": one node alone is faster" if gain < 1 else "")
            )


def _place(each: Ran) -> str:
    nodes, ranks = each.layout
    return f"{nodes} node{'s' if nodes > 1 else ''} x {ranks} rank{'s' if ranks > 1 else ''}"
