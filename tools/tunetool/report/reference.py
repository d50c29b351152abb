"""The result of `bench reference` for people: one line for each part, the figures, the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunetool.node.play.reasons import by_reason, line
from tunetool.node.units import format_figure
from tunetool.record import Measurement, Record
from tunetool.report.page import line_of, new_table, print_block, print_verdict_line, word
from tunetool.view.text import number

LEFT_OUT = "left out"
"""How the first reason of such a host begins."""


def print_reference(record: Record, path: Path | None, console: Console) -> None:
    """Print the parts, then the figures, then the verdict. ``path``: where the record is."""
    console.print(line_of(f"{record.node.host}: `{record.target}`"))
    table = new_table()
    table.add_column("part")
    table.add_column("verdict")
    table.add_column("record", overflow="fold")
    table.add_column("reason", ratio=1, overflow="fold")
    for part in record.parts or []:
        shown = "not run" if part.status == "skip" else part.status.upper()
        cells = (Text(part.run or "-"), Text(next(iter(part.reasons), "")))
        table.add_row(Text(part.name), word(shown), *cells)
    console.print(table)
    hosts = record.hosts or []
    out = [host for host in hosts if any(reason.startswith(LEFT_OUT) for reason in host.reasons)]
    for group in by_reason((host.host, "", host.reasons[0]) for host in out):
        alone = f"{group.hosts[0]} was {group.reason}"
        print_block(console, alone if len(group.hosts) == 1 else line(group, len(hosts)), 2)
    if record.measurements:
        console.print(_figures(record))
    kept = next((part.run for part in record.parts or [] if part.run), None)
    if kept is not None:
        print_block(console, f"each part's own table: `tunetool report show {kept}`", 2)
    print_verdict_line(record, path, console)


def _figures(record: Record) -> Table:
    table = new_table()
    table.add_column("figure", overflow="fold")
    table.add_column("median", justify="right")
    table.add_column("medium", overflow="fold")
    table.add_column("host", overflow="fold")
    for cells in figures(record):
        table.add_row(*map(Text, cells))
    return table


def figures(record: Record) -> Iterator[tuple[str, str, str, str]]:
    """Name, median with its unit, medium and host of each measurement."""
    for each in record.measurements:
        yield each.name, value_of(each), each.medium, each.host or ""


def value_of(figure: Measurement) -> str:
    """The figure with its unit."""
    return f"{number(figure.value)} s" if figure.unit == "s" else format_figure(figure.value, figure.unit)
