"""What `bench strategies` shows: predicted and measured steps, the networks, and advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunetool.advise.precision import computed
from tunetool.bench.strategies.figures import NOTE
from tunetool.bench.strategies.predict import LEFT_OUT
from tunetool.node.units import format_bandwidth, format_size
from tunetool.record import CheckResult, Measurement, Record, Scalar, chosen
from tunetool.view.figures import has_reasons
from tunetool.view.model import Block, Cells, Notes, Plot, Section, Table, View
from tunetool.view.plots import Bar, bar_of, bars
from tunetool.view.text import number

SOURCE = (
    "Mark III Systems Blog, `Benchmarking LLM, Multi-GPU Finetuning Training Strategies with PyTorch Lightning on "
    "NVIDIA DGX`"
)
HARDWARE = "2 DGX with 8 V100 each, 1000 Mb/s between them"
LINK = 1000e6 / 8
"""1000 Mb/s between its two nodes, in bytes per second."""


@dataclass(frozen=True)
class Epoch:
    """The time of one epoch on one layout."""

    nodes: int
    ranks: int
    """On each node."""
    stage: int | None
    """None: not said."""
    words: str
    """As it was published."""
    low: float
    """The shortest time that the words allow, in minutes."""
    high: float

    @property
    def name(self) -> str:
        """As the matrix writes it."""
        return f"{self.nodes}x{self.ranks}" + (f":z{self.stage}" if self.stage is not None else "")

    @property
    def shape(self) -> tuple[str, int]:
        """By which a scaled-down cell is its counterpart: one rank, one node or several, and the stage."""
        return shape(self.nodes, self.ranks, self.stage if self.stage is not None else 2)


def shape(nodes: int, ranks: int, stage: int) -> tuple[str, int]:
    """Of a cell: cells of one shape differ in numbers of nodes and ranks only."""
    return ("nodes" if nodes > 1 else "node" if ranks > 1 else "one", stage)


ONE, HOURS_OF_ONE = 60.0, (60.0, 75.0)
"""Minutes: \"a little over an hour\" is more than 60; above 75 nobody would say \"a little\"."""
_FEW = (2.0, 5.0)
"""\"A few minutes\"."""
EPOCHS: Sequence[Epoch] = (
    Epoch(1, 1, None, "a little over an hour", *HOURS_OF_ONE),
    Epoch(1, 8, 2, "~ 9 minutes", 8.5, 9.5),
    Epoch(2, 8, 2, "a little less than 8 minutes", 7.0, 8.0),
    Epoch(2, 8, 3, "about 3 times as long as one GPU", 2.5 * HOURS_OF_ONE[0], 3.5 * HOURS_OF_ONE[1]),
    Epoch(1, 8, 3, "a few minutes slower than ZeRO 2", 8.5 + _FEW[0], 9.5 + _FEW[1]),
)


def relative(epoch: Epoch) -> str:
    """Its time over that of one GPU, as far as the words go."""
    if epoch == EPOCHS[0]:
        return "1"
    if epoch.stage == 3 and epoch.nodes > 1:
        return "~3"  # published as a ratio
    low, high = epoch.low / HOURS_OF_ONE[1], epoch.high / HOURS_OF_ONE[0]
    return f"{low:.2f}-{high:.2f}"


def remarks() -> list[str]:
    """What its numbers need beside them, and whether its explanation follows from them."""
    node, nodes, over = EPOCHS[1], EPOCHS[2], EPOCHS[3]
    gain = 9.0 / 8.0
    return [
        f"published: {SOURCE}; {HARDWARE}. Times are its words in minutes: a little over an hour as "
        f"{HOURS_OF_ONE[0]:g}-{HOURS_OF_ONE[1]:g}, a few minutes as {_FEW[0]:g}-{_FEW[1]:g}; the model, the batch and "
        "the samples are not said, so that only ratios compare",
        f"published: more than 6x on 8 GPUs follows from its times (60 / 9 = {60 / 9:.1f}x, {60 / 9 / 8:.0%} of 8); "
        f"from 8 to 16 GPUs it gains {gain:.2f}x of the possible 2x; its times include the start, which is a column of "
        "its own here",
        f"published: 1000 Mb/s are {LINK / 1e9:g} GB/s; ZeRO-3 over it took {over.low / nodes.high:.0f} to "
        f"{over.high / nodes.low:.0f} times as long as ZeRO-2. That ZeRO-3 shares all parameters explains it only "
        "where most of them are frozen (LoRA): ZeRO-2 never sends those. With all parameters trained, DeepSpeed sends "
        "up to 3 (N-1)/N of the model in either stage (the ZeRO paper: 3 against 2), and both would be about as slow",
        f"published: ZeRO-3 on one node, {node.low + _FEW[0]:g}-{node.high + _FEW[1]:g} minutes, shows that the "
        "network between nodes was the cause; it does not show what ZeRO-3 costs by itself (its hooks)",
    ]


_TITLES = (
    *("nodes x ranks : stage", "step, s", "predicted, s", "error", "sent/step", "calls", "epoch, x 1x1"),
    *("efficiency", "start, s"),
)
_WIDE = (*_TITLES, "step, x ZeRO-2", "states of a rank")
_PUBLISHED = ("published", "epoch", "x 1 GPU", "here", "epoch here", "x 1x1")
_NETWORK = ("network", "latency, ms", "all-reduce", "bus", "all-gather", "bus", "reduce-scatter", "bus")
_KINDS = ("all_reduce", "all_gather", "reduce_scatter")
_MEASURED, _PREDICTED, _START = "#1f6feb", "#8c959f", "#2da44e"

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

    def shown(self, name: str) -> str:
        """The median of a figure."""
        figure = self.figures.get(name)
        return number(figure.value) if figure is not None else "-"

    @property
    def predicted(self) -> float | None:
        """Seconds of a step; None where nothing predicts it."""
        return self.number("predicted_seconds") if "predicted_seconds" in self.parameters else None

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


def view(record: Record, directory: Path | None = None) -> View:
    """What is shown."""
    ran = cells(record)
    return View(
        f"ZeRO strategies from {record.node.host}",
        head=list(_head(ran)),
        sections=list(_sections(record, ran)),
        advice=advice(record),
        checks=not ran and has_reasons(record),
    )


def _sections(record: Record, ran: Sequence[Cell]) -> Iterator[Section]:
    if ran:
        yield Section("Steps", list(_steps(ran)))
        theirs = Table(_PUBLISHED, list(_published_rows(ran)), ("x 1 GPU", "epoch here", "x 1x1"), sortable=False)
        yield Section("Published epochs", [theirs, Notes(_published_notes(ran))])
    if network := list(_network(networks(record))):
        yield Section("network, GB/s", network)
    if lines := list(_checks(record)):
        yield Section("Left out, failed or not known", [Notes(lines)], on="" if ran else "terminal")


def _steps(ran: Sequence[Cell]) -> Iterator[Block]:
    drawn = []
    for each in ran:
        drawn.append(bar_of(each.name, each.step, _MEASURED))
        if (value := each.predicted) is not None:
            drawn.append(Bar(f"{each.name} predicted", value, value, value, _PREDICTED))
    yield Plot(bars("step, s: measured (whiskers: range of the rounds) and predicted", drawn))
    starts = [bar_of(each.name, each.figures["start"], _START) for each in ran if "start" in each.figures]
    yield Plot(bars("start, s: processes, imports, communicator, model, engine", starts))
    rows = [_row(each) for each in ran]
    yield Table(_TITLES, rows)
    wide = [
        [*row, each.shown("versus_zero2"), format_size(round(each.number("state_bytes")))]
        for row, each in zip(rows, ran, strict=True)
    ]
    yield Table(_WIDE, wide, folded="The same beside ZeRO-2, with the states of a rank")
    yield Notes(list(_notes(ran)))


def _row(each: Cell) -> Cells:
    calls = sum(int(each.number(f"{kind}_calls")) for kind in _KINDS)
    return [
        *(each.name, number(each.step.value)),
        number(each.predicted) if each.predicted is not None else "-",
        f"{each.number('prediction_error'):+.0%}" if each.predicted is not None else "-",
        format_size(round(each.number("sent_bytes"))),
        str(calls),
        *(each.shown(name) for name in ("versus_alone", "efficiency", "start")),
    ]


def _checks(record: Record) -> Iterator[str]:
    """A line for each check that did not pass."""
    for check in record.checks:
        if check.status != "pass":
            word = "" if check.id == NOTE else f"{_word(check.status)}, "
            yield f"{_name(check)}: {word}{check.found}"


def _name(check: CheckResult) -> str:
    parts = (f"z{value}" if key == "stage" else value for key, value in check.labels.items() if key != "subject")
    return ".".join(parts) or check.id


def _word(status: str) -> str:
    return {"skip": "left out", "fail": "FAIL", "unknown": "not known"}[status]


def _head(ran: Sequence[Cell]) -> Iterator[str]:
    if not ran:
        return
    parameters = ran[0].parameters
    count, trained = (float(parameters[name]) / 1e6 for name in ("parameters", "trained"))
    million = f"{count:.1f} million parameters, {trained:.2f} million trained"
    launch = f"by `{parameters['launcher']}`, {computed(parameters, 'compute')}"
    yield f"`{parameters['model']}` ({million}: {parameters['tuning']}), {launch}"
    rounds = max(len(each.step.samples or []) for each in ran)
    yield (
        f"{parameters['batch_size']} samples per rank and step; medians of {rounds} round(s) of {parameters['steps']} "
        "steps without the first two"
    )


def _notes(ran: Sequence[Cell]) -> Iterator[str]:
    yield (
        "2x1:z3: 2 nodes with 1 rank each, under ZeRO-3; epoch, x 1x1: time for the same samples, relative to one "
        "rank; efficiency: share of N times one rank's speed; start: processes, imports, communicator, model and "
        "engine, not part of the step"
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


def _counterpart(epoch: Epoch, ran: Sequence[Cell]) -> Cell | None:
    """The cell that was measured here as that epoch was there, else one of its shape; None where there is none."""
    stage = epoch.stage if epoch.stage is not None else 2
    same = [each for each in ran if (*each.layout, each.stage) == (epoch.nodes, epoch.ranks, stage)]
    alike = [each for each in ran if shape(*each.layout, each.stage) == epoch.shape]
    return next(iter([*same, *alike]), None)


def _epoch_seconds(each: Cell) -> float | None:
    """An epoch over the samples that were made, extrapolated from the step; None for samples of the user's own."""
    images = each.number("images")
    if not images:
        return None
    return each.step.value * -(-images // (each.number("batch_size") * each.number("world")))


def _published_rows(ran: Sequence[Cell]) -> Iterator[Cells]:
    """Each published epoch: cell, words, over one GPU; the cell here, its epoch, over one rank."""
    for epoch in EPOCHS:
        ours = _counterpart(epoch, ran)
        seconds = _epoch_seconds(ours) if ours is not None else None
        alone = "1" if ours is not None and ours.layout == (1, 1) else ours.shown("versus_alone") if ours else "-"
        yield (
            epoch.name,
            epoch.words,
            relative(epoch),
            ours.name if ours is not None else "-",
            f"{number(seconds)} s" if seconds is not None else "-",
            alone,
        )


def _published_notes(ran: Sequence[Cell]) -> list[str]:
    """Where the published times are from, their corrections, and what the epochs here are."""
    images = next((int(each.number("images")) for each in ran if each.number("images")), None)
    here = f"epochs here: over {images} images, extrapolated from the step, without the start"
    return [*([here] if images else []), *remarks()]


def _network(links: Mapping[str, Mapping[str, Measurement]]) -> Iterator[Block]:
    rates = [
        Bar(f"{layout} {kind}".replace("_", "-"), *3 * (each.value / 1e9,), _MEASURED)
        for layout, figures in links.items()
        for kind in _KINDS
        if (each := figures.get(f"{kind}.bus_bandwidth")) is not None
    ]
    if rates:
        yield Plot(bars("bus bandwidth, GB/s", rates))
    rows = [_network_row(layout, figures) for layout, figures in links.items() if "latency" in figures]
    if rows:
        yield Table(_NETWORK, rows)
        yield Notes(["algorithm and bus bandwidth as nccl-tests define them; latency of one number"])


def _network_row(layout: str, figures: Mapping[str, Measurement]) -> Cells:
    row = [f"{layout} {figures['latency'].parameters['backend']}", number(figures["latency"].value * 1e3)]
    for kind in _KINDS:
        for rate in ("algorithm", "bus"):
            bandwidth = figures.get(f"{kind}.{rate}_bandwidth")
            row.append(number(bandwidth.value / 1e9) if bandwidth is not None else "-")
    return row


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
