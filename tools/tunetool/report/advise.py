"""The advice about checkpoint intervals: a table of both states under every rule, and one sentence for each; another
one of what the loss of a node costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunetool.advise.checkpoint import FULL_STATE, WEIGHTS, Choice, Job, State, format_duration
from tunetool.advise.drive_life import Guarded
from tunetool.advise.node_loss import DEFAULT_NODE_MTBF, Cost
from tunetool.node.units import format_bandwidth, format_size
from tunetool.report.page import new_table, print_block


def print_plan(job: Job, states: Sequence[State], what: str, source: str, writers: int, console: Console) -> None:
    """Print the table and the advice. ``what`` describes the job, ``source`` where its bandwidth comes from."""
    print_block(console, what, 2)
    together = f"; {writers} nodes at once: {format_bandwidth(job.bandwidth)}" if writers > 1 else ""
    print_block(console, f"written at {source}{together}", 2)
    if job.node_mtbf is not None:
        each = f"a node fails every {format_duration(job.node_mtbf)}"
        print_block(console, f"{each}, one of {job.nodes} every {format_duration(job.node_mtbf / job.nodes)}", 2)
    console.print(_table(job, states))
    for state in states:
        print_block(console, f"{state.name}: {state.advice}", 2)
    print_block(
        console,
        f"weights only: {WEIGHTS} bytes a parameter (bf16); full state: {FULL_STATE} (bf16 weights, and in fp32 the "
        "master weights and Adam's two moments)",
        2,
    )


def _table(job: Job, states: Sequence[State]) -> Table:
    table = new_table()
    table.add_column("")
    columns = [(state, choice) for state in states for choice in state.choices]
    for _, choice in columns:
        table.add_column(Text(choice.rule), justify="right")
    first = {state.name: state.choices[0] for state in states}

    def row(title: str, cell: Any) -> None:
        table.add_row(Text(title), *(Text(cell(state, choice)) for state, choice in columns))

    def once(value: Any) -> Any:
        # A value of the whole state is shown once, in the state's first column.
        return lambda state, choice: value(state) if choice is first[state.name] else ""

    row("saved", once(lambda state: state.name))
    row("bytes", once(lambda state: format_size(state.size)))
    row("written in", once(lambda state: format_duration(state.write)))
    row("save every", lambda _, choice: format_duration(choice.interval))
    row("samples", lambda _, choice: f"{choice.samples:,.0f}")
    if job.batch is not None:
        row("steps", lambda _, choice: f"{choice.steps:,}")
    row("lost in all", lambda _, choice: f"{choice.loss.total:.2%}")
    row("  writing", lambda _, choice: f"{choice.loss.write:.2%}")
    if job.node_mtbf is not None:
        row("  rework", lambda _, choice: f"{choice.loss.rework:.2%}")
        row("  restarts", lambda _, choice: f"{choice.loss.restart:.2%}")
    return table


def print_guarded(job: Job, states: Sequence[State], guarded: Sequence[Guarded] | None, console: Console) -> None:
    """Print what the loss of one node costs, what that takes, and how long the drives last."""
    if guarded is None:
        return
    if job.node_mtbf is None:
        print_block(console, f"a node fails every {format_duration(DEFAULT_NODE_MTBF)}: {_SOURCE}", 2)
    console.print(_loss_table(job, states, guarded))
    for state, each in zip(states, guarded, strict=True):
        print_block(console, f"{state.name}: {_loss_advice(each)}", 2)


_SOURCE = "the 419 failures of 2,048 nodes in 54 days of Llama 3 (arXiv 2407.21783, table 5); give yours by `--mtbf`"


def _loss_table(job: Job, states: Sequence[State], guarded: Sequence[Guarded]) -> Table:
    table = new_table()
    table.add_column("one node is lost")
    columns: list[tuple[str, Guarded, Cost]] = []
    for state, each in zip(states, guarded, strict=True):
        costs = [("drains alone", each.lost.drained)]
        costs += [("replicas", each.lost.replicated)] if each.lost.replicated is not None else []
        for number, (title, cost) in enumerate(costs):
            table.add_column(title, justify="right")
            columns.append(("" if number else state.name, each, cost))

    def row(title: str, cell: Callable[[Cost], str]) -> None:
        table.add_row(title, *(cell(cost) for _, _, cost in columns))

    table.add_row("saved", *(name for name, _, _ in columns))
    row("costs on average", lambda cost: format_duration(cost.mean))
    row("  samples", lambda cost: f"{cost.mean * job.samples_per_second:,.0f}")
    if job.batch is not None:
        row("  steps", lambda cost: f"{cost.mean * job.samples_per_second / (job.batch or 1):,.0f}")
    row("costs at most", lambda cost: format_duration(cost.most))
    row("costs a month", lambda cost: format_duration(cost.month))
    row("drain every", lambda cost: format_duration(cost.drain_every))
    row("  storage busy", lambda cost: f"{cost.shared_busy:.1%}")
    if any(each.lost.is_worth_it for each in guarded):
        row("replicate every", lambda cost: _or_none(cost.replicate_every, format_duration))
        row("  takes", lambda cost: _or_none(cost.replica, format_duration))
        row("  network busy", lambda cost: _or_none(cost.network_busy, lambda share: f"{share:.1%}"))
        row("  room on the peer", lambda cost: _or_none(cost.peer_bytes, format_size))
    return table


def _or_none(value: Any, shown: Callable[[Any], str]) -> str:
    return "-" if value is None else shown(value)


def _loss_advice(guarded: Guarded) -> str:
    lost, life = guarded.lost, guarded.life
    if lost.replicated is None:
        said = "give `--network` to compare with replicas on other nodes"
    elif lost.is_worth_it:
        saved = lost.drained.month - lost.replicated.month
        said = f"replicas save {format_duration(saved)} a month"
    else:
        said = "drains are there as soon as replicas would be: replicas save nothing"
    if life is None:
        return said
    writes = "" if life.drive_writes_a_day is None else f", {life.drive_writes_a_day:.2g} drive writes"
    said += f"; checkpoints write {format_size(round(life.bytes_a_day))} a day to a node's drives{writes}: "
    said += f"their rating is used up in {life.years:.3g} years"
    if not life.outlives_warranty:
        said += ". WARNING: that of new drives ends before their warranty: save or replicate less often, or take "
        said += "drives of a higher rating"
    return said


def as_document(
    job: Job, states: Sequence[State], source: str, guarded: Sequence[Guarded] | None = None
) -> dict[str, Any]:
    """The plan as JSON values: bytes, bytes per second, seconds, and shares of the whole time."""
    asked = {name: value for name, value in asdict(job).items() if value is not None}
    rows = [_state(state) for state in states]
    for row, each in zip(rows, guarded or (), strict=False):
        row["lost_node"] = {**asdict(each.lost), "node_mtbf": job.node_mtbf or DEFAULT_NODE_MTBF}
        if each.life is not None:
            row["drives"] = asdict(each.life)
    return {"job": {**asked, "bandwidth_source": source}, "states": rows}


def _state(state: State) -> dict[str, Any]:
    return {
        "name": state.name,
        "bytes": state.size,
        "write_seconds": state.write,
        "choices": [_choice(choice) for choice in state.choices],
        "advice": state.advice,
    }


def _choice(choice: Choice) -> dict[str, Any]:
    choice_values: dict[str, Any] = {
        "rule": choice.rule,
        "interval_seconds": choice.interval,
        "samples": choice.samples,
        "lost": {"all": choice.loss.total, **asdict(choice.loss)},
    }
    return choice_values if choice.steps is None else {**choice_values, "steps": choice.steps}
