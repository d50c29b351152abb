"""The result of `bench strategies` for people: predicted and measured steps, the networks, and advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunetool.advise.precision import computed
from tunetool.bench.strategies import published
from tunetool.bench.strategies.figures import NOTE
from tunetool.bench.strategies.predict import LEFT_OUT
from tunetool.bench.strategies.published import Epoch
from tunetool.node.units import format_bandwidth, format_size
from tunetool.record import CheckResult, Measurement, Record, Scalar, chosen
from tunetool.report.page import add_number_columns, new_table, print_block
from tunetool.report.table import print_verdict_line
from tunetool.view.text import number

_PHASES = ("rendezvous", "imports", "communicator", "model_load", "engine")
_COSTLY, _CHEAP = 1.25, 1.1
"""Step time of ZeRO-3 relative to a lower stage: a warning from the first on, negligible below the second."""
_STATE_SHARE = 0.8
"""Share of a rank's memory that weights, gradients and states may take: activations need the rest."""
_POOR_SCALING = 0.7
"""Scaling efficiency below which more nodes get a warning."""


@dataclass(frozen=True)
class Cell:
    """A cell of the matrix (layout and ZeRO stage) with its figures, by the last part of their names."""

    name: str
    figures: Mapping[str, Measurement]

    @property
    def step(self) -> Measurement:
        """The measurement of the step time."""
        return self.figures["step"]

    @property
    def parameters(self) -> Mapping[str, Scalar]:
        """The conditions of the measurement of the step."""
        return self.step.parameters

    def number(self, name: str) -> float:
        """One of ``parameters`` as a number; 0 where it is missing."""
        return float(self.parameters.get(name, 0.0))

    @property
    def layout(self) -> tuple[int, int]:
        """Number of nodes, and of ranks on each."""
        return int(self.number("nodes")), int(self.number("ranks"))

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return int(self.number("zero_stage"))


def cells(record: Record) -> list[Cell]:
    """The measured cells in the order in which they ran."""
    by_cell: dict[str, dict[str, Measurement]] = {}
    for each in chosen(record.measurements, subject="strategies"):
        if "stage" in each.labels:
            phase = each.labels.get("phase")
            cell = f"{each.labels['layout']}:z{each.labels['stage']}"
            by_cell.setdefault(cell, {})[f"{each.figure}.{phase}" if phase else each.figure] = each
    return [Cell(name, figures) for name, figures in by_cell.items() if "step" in figures]


def networks(record: Record) -> dict[str, dict[str, Measurement]]:
    """The network measurements by layout, then by the last part of their names."""
    by_layout: dict[str, dict[str, Measurement]] = {}
    for each in chosen(record.measurements, subject="strategies", part="network"):
        collective = each.labels.get("collective")
        figure = f"{collective}.{each.figure}" if collective else each.figure
        by_layout.setdefault(each.labels["layout"], {})[figure] = each
    return by_layout


def print_strategies(record: Record, path: Path | None, console: Console) -> None:
    """Print the tables of steps and networks, the advice and the verdict. ``path``: where the record is."""
    ran, links = cells(record), networks(record)
    for line in _head(record, ran):
        print_block(console, line, 2)
    if ran:
        console.print(_table(ran))
        for line in _notes(ran):
            print_block(console, line, 2)
        console.print()
        console.print(_published_table(ran))
        for line in published_notes(ran):
            print_block(console, line, 2)
    if any("latency" in figures for figures in links.values()):
        console.print()
        console.print(_network_table(links))
        print_block(console, "algorithm and bus bandwidth as nccl-tests define them; latency of one number", 2)
    for check in record.checks:
        if check.status != "pass":
            word = "" if check.id == NOTE else f"{_word(check.status)}, "
            print_block(console, f"{_name(check)}: {word}{check.found}", 2)
    for line in advice(record):
        print_block(console, line, 2)
    print_verdict_line(record, path, console)


def _name(check: CheckResult) -> str:
    parts = (f"z{value}" if key == "stage" else value for key, value in check.labels.items() if key != "subject")
    return ".".join(parts) or check.id


def _word(status: str) -> str:
    return {"skip": "left out", "fail": "FAIL", "unknown": "not known"}[status]


def _head(record: Record, ran: Sequence[Cell]) -> Iterator[str]:
    if not ran:
        return
    parameters = ran[0].parameters
    count, trained = (float(parameters[name]) / 1e6 for name in ("parameters", "trained"))
    million = f"{count:.1f} million parameters, {trained:.2f} million trained"
    launch = f"by `{parameters['launcher']}`, {computed(parameters, 'compute')}"
    yield f"{record.node.host}: `{parameters['model']}` ({million}: {parameters['tuning']}), {launch}"
    rounds = max(len(each.step.samples or []) for each in ran)
    yield (
        f"{parameters['batch_size']} samples per rank and step; medians of {rounds} round(s) of {parameters['steps']} "
        "steps without the first two"
    )


def _table(ran: Sequence[Cell]) -> Table:
    table = new_table()
    table.add_column("nodes x ranks")
    add_number_columns(
        table, "step, s", "predicted", "error", "sent/step", "calls", "epoch, x 1x1", "efficiency", "start, s"
    )
    for each in ran:
        predicted = each.parameters.get("predicted_seconds")
        calls = sum(int(each.number(f"{kind}_calls")) for kind in ("all_reduce", "all_gather", "reduce_scatter"))
        row = [
            each.name,
            number(each.step.value),
            number(float(predicted)) if predicted is not None else "-",
            f"{each.number('prediction_error'):+.0%}" if predicted is not None else "-",
            format_size(round(each.number("sent_bytes"))),
            str(calls),
            _figure(each, "versus_alone"),
            _figure(each, "efficiency"),
            _figure(each, "start"),
        ]
        table.add_row(*map(Text, row))
    return table


def _figure(each: Cell, figure: str) -> str:
    measurement = each.figures.get(figure)
    return number(measurement.value) if measurement is not None else "-"


def _notes(ran: Sequence[Cell]) -> Iterator[str]:
    yield (
        "epoch, x 1x1: time for the same samples, relative to one rank; efficiency: share of N times one rank's "
        "speed; start: processes, imports, communicator, model and engine, not part of the step"
    )
    for each in ran:
        basis = each.parameters.get("prediction_basis")
        if basis is not None:
            waits = number(each.number("predicted_waiting_seconds"))
            made = int(each.number("predictions"))
            yield (f"{each.name}: predicted with {waits} s of waiting{_renewed(made)}; computation: {basis}")
    if any("prediction_basis" in each.parameters for each in ran):
        yield f"no prediction has: {LEFT_OUT}"


def _renewed(made: int) -> str:
    if made < 3:
        return ", renewed once" if made == 2 else ""
    return f", the middle of {made - 1} renewals"


def counterpart(epoch: Epoch, ran: Sequence[Cell]) -> Cell | None:
    """The cell that was measured here as that epoch was there, else one of its shape; None where there is none."""
    stage = epoch.stage if epoch.stage is not None else 2
    same = [each for each in ran if (*each.layout, each.stage) == (epoch.nodes, epoch.ranks, stage)]
    alike = [each for each in ran if published.shape(*each.layout, each.stage) == epoch.shape]
    return next(iter([*same, *alike]), None)


def epoch_seconds(each: Cell) -> float | None:
    """An epoch over the samples that were made, extrapolated from the step; None for samples of the user's own."""
    images = each.number("images")
    if not images:
        return None
    return each.step.value * -(-images // (each.number("batch_size") * each.number("world")))


def published_rows(ran: Sequence[Cell]) -> Iterator[tuple[str, str, str, str, str, str]]:
    """Each published epoch: cell, words, over one GPU; the cell here, its epoch, over one rank."""
    for epoch in published.EPOCHS:
        ours = counterpart(epoch, ran)
        seconds = epoch_seconds(ours) if ours is not None else None
        alone = "1" if ours is not None and ours.layout == (1, 1) else _figure(ours, "versus_alone") if ours else "-"
        yield (
            epoch.name,
            epoch.words,
            published.relative(epoch),
            ours.name if ours is not None else "-",
            f"{number(seconds)} s" if seconds is not None else "-",
            alone,
        )


PUBLISHED_TITLES = ("published", "epoch", "x 1 GPU", "here", "epoch", "x 1x1")


def _published_table(ran: Sequence[Cell]) -> Table:
    table = new_table()
    for title in PUBLISHED_TITLES:
        words = title in ("published", "here") or (title == "epoch" and len(table.columns) == 1)
        table.add_column(title, justify="left" if words else "right")
    for row in published_rows(ran):
        table.add_row(*map(Text, row))
    return table


def published_notes(ran: Sequence[Cell]) -> list[str]:
    """Where the published times are from, their corrections, and what the epochs here are."""
    images = next((int(each.number("images")) for each in ran if each.number("images")), None)
    here = f"epochs here: over {images} images, extrapolated from the step, without the start"
    return [*([here] if images else []), *published.remarks()]


def _network_table(links: Mapping[str, Mapping[str, Measurement]]) -> Table:
    table = new_table()
    table.add_column("network, GB/s")
    add_number_columns(table, "latency, ms", "all-reduce", "bus", "all-gather", "bus", "reduce-scatter", "bus")
    for layout, figures in links.items():
        if "latency" not in figures:
            continue
        row = [f"{layout} {figures['latency'].parameters['backend']}", number(figures["latency"].value * 1e3)]
        for kind in ("all_reduce", "all_gather", "reduce_scatter"):
            for rate in ("algorithm", "bus"):
                bandwidth = figures.get(f"{kind}.{rate}_bandwidth")
                row.append(number(bandwidth.value / 1e9) if bandwidth is not None else "-")
        table.add_row(*map(Text, row))
    return table


def advice(record: Record) -> list[str]:
    """Sentences of advice: where ZeRO-3 is too costly, and where more nodes are not worth it."""
    ran, links = cells(record), networks(record)
    lines = [line for each in ran if each.stage == 3 for line in _stage3(each, ran, links)]
    lines += _scaling(ran)
    return lines


def _stage3(third: Cell, ran: Sequence[Cell], links: Mapping[str, Mapping[str, Measurement]]) -> Iterator[str]:
    lower_stages = [each for each in ran if each.layout == third.layout and each.stage in (1, 2)]
    if not lower_stages or third.layout == (1, 1):
        return
    below = max(lower_stages, key=lambda each: each.stage)
    times = third.step.value / below.step.value
    where = f"on {_layout_text(third)}"
    fits = below.number("state_bytes") <= _STATE_SHARE * below.number("memory_bytes")
    needed = (
        f"ZeRO-{below.stage} needs {format_size(round(below.number('state_bytes')))} on each rank before activations, "
        f"of {format_size(round(below.number('memory_bytes')))}"
    )
    if times < _CHEAP:
        yield (
            f"ZeRO-3 {where} takes about as long as ZeRO-{below.stage} ({times:.2f}x): use it where memory is short; "
            f"{needed}"
        )
        return
    if times < _COSTLY:
        yield f"ZeRO-3 {where} takes {times:.2f}x the time of ZeRO-{below.stage}; {needed}"
        return
    link = _link(third, links)
    if fits:
        lower = f"ZeRO-{below.stage}"
        yield f"ZeRO-3 {where} takes {times:.1f}x the time of {lower}: use {lower}{link}; {needed}"
    else:
        yield f"ZeRO-3 {where} takes {times:.1f}x the time of ZeRO-{below.stage}, which does not fit: {needed}{link}"


def _link(third: Cell, links: Mapping[str, Mapping[str, Measurement]]) -> str:
    """Whether ZeRO-3 waits for the network, and the bandwidth that would hide its communication."""
    waiting, predicted = third.number("predicted_waiting_seconds"), third.number("predicted_seconds")
    gather = links.get("{}x{}".format(*third.layout), {}).get("all_gather.bus_bandwidth")
    if gather is None or waiting < 0.2 * predicted:
        return "; it does not wait for the network, but for DeepSpeed's hooks around each module"
    compute = third.number("predicted_compute_seconds")
    sent = third.number("sent_bytes")
    enough = sent / compute if compute else float("inf")
    if enough <= gather.value:
        return "; it waits for the latency of many small collectives, not for bandwidth"
    return (
        f" or a faster link: each rank sends {format_size(round(sent))} per step at {format_bandwidth(gather.value)}; "
        f"with {format_bandwidth(enough)} the computation could hide it"
    )


def _scaling(ran: Sequence[Cell]) -> Iterator[str]:
    """A warning for each layout with several nodes that scales poorly."""
    for each in ran:
        nodes, ranks = each.layout
        if nodes == 1:
            continue
        single_node = next((other for other in ran if other.layout == (1, ranks) and other.stage == each.stage), None)
        if single_node is None:
            continue
        gain = single_node.step.value * nodes / each.step.value
        if gain < _POOR_SCALING * nodes:
            yield (
                f"{nodes} nodes train {gain:.2f} times as fast as one under ZeRO-{each.stage}, with {ranks} rank(s) "
                f"each" + (": one node alone is faster" if gain < 1 else "")
            )


def _layout_text(each: Cell) -> str:
    nodes, ranks = each.layout
    return f"{nodes} node{'s' if nodes > 1 else ''} x {ranks} rank{'s' if ranks > 1 else ''}"
