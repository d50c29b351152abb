"""The advice about checkpoint intervals: a table of both states under every rule, and one sentence for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunetool.advise.checkpoint import FULL_STATE, WEIGHTS, Choice, Job, State, format_duration
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


def as_document(job: Job, states: Sequence[State], source: str) -> dict[str, Any]:
    """The plan as JSON values: bytes, bytes per second, seconds, and shares of the whole time."""
    asked = {name: value for name, value in asdict(job).items() if value is not None}
    return {"job": {**asked, "bandwidth_source": source}, "states": [_state(state) for state in states]}


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
