"""The speed to expect of a kind of node: its nodes as a table, the proposals with their reasons, the variables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from tunetool.advise.expect import DIRECTIONS, Ceiling, NodeFigures, Proposal, reaches, variables
from tunetool.node.units import format_bandwidth
from tunetool.report.page import add_number_columns, line_of, new_table, print_block
from tunetool.view.text import number


def print_expect(
    nodes: Sequence[NodeFigures], ceiling: Ceiling | None, proposals: Sequence[Proposal], console: Console
) -> None:
    """Print the table, the reasons, and the lines for an inventory."""
    limit = f"{format_bandwidth(ceiling.value)} for {ceiling.drives}" if ceiling is not None else "unknown"
    print_block(console, f"ceiling of the drives' links: {limit}", 2)
    if nodes:
        table = new_table()
        table.add_column("node", overflow="fold")
        add_number_columns(table, "read GB/s", "write GB/s")
        table.add_column("reaches the proposal", overflow="fold")
        for each in nodes:
            speeds = [number(each.figures[way].value / 1e9) if way in each.figures else "-" for way in DIRECTIONS]
            answer = "yes" if reaches(each, proposals) else f"no: {each.problem}" if each.problem else "no"
            table.add_row(*map(Text, (each.host, *speeds, answer)))
        console.print(table)
    for proposal in proposals:
        print_block(console, f"{proposal.direction} {proposal.text}: {proposal.reason}", 2)
    for note in (note for proposal in proposals for note in proposal.notes):
        print_block(console, note, 2)
    console.print(line_of("for the group_vars of these nodes:"))
    for name, text in variables(proposals).items():
        console.print(line_of(f"{name}: {text}"))
