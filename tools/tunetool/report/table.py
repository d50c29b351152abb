"""Hosts of a fleet as text of 100 columns: their verdicts, figures and reasons in common; the drives of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tunetool.fleet.outliers import OUTLIER
from tunetool.fleet.provision import ProvisionResult
from tunetool.fleet.same_reasons import same_reasons
from tunetool.measure.figures import sequential_figures
from tunetool.node.play.host_summary import lines
from tunetool.node.units import format_bandwidth
from tunetool.record import FleetHost, Record
from tunetool.report.page import (
    STYLES,
    WIDTH,
    add_number_columns,
    line_of,
    new_table,
    print_block,
    print_same_reasons,
    print_verdict_line,
    table_console,
    verdict_word,
    word,
)
from tunetool.view.text import number

__all__ = [
    "median_of",
    "print_fleet",
    "print_fleet_verdict",
    "print_provision",
    "print_verdict_line",
    "slowest",
    "speed",
    "table_console",
    "word",
]


def print_fleet(hosts: Sequence[tuple[FleetHost, Record | None]], console: Console) -> None:
    """Print one line for each host, then the slowest host, reasons of several hosts, and the outliers.

    Hosts that have no figures and a reason in common have no line of their own.
    """
    groups = same_reasons([host for host, _ in hosts])
    grouped = {name for group in groups for name in group.hosts}
    table = new_table()
    table.add_column("host", overflow="fold")
    table.add_column("verdict")
    add_number_columns(table, "read GB/s", "write GB/s")
    table.add_column("reason", ratio=1, overflow="fold")
    for host, record in hosts:
        read, write = (median_of(record, direction) for direction in ("read", "write"))
        if host.host in grouped and read is None and write is None:
            continue
        reason = next((each for each in host.reasons if not each.startswith(OUTLIER)), "")
        reason = "" if host.host in grouped else reason
        table.add_row(host.host, word(host.status.upper()), speed(read), speed(write), reason)
    if table.row_count:
        console.print(table)
    line = slowest(hosts)
    if line:
        console.print(line_of(line))
    print_same_reasons(console, groups, len(hosts))
    for host, _ in hosts:
        for reason in host.reasons:
            if reason.startswith(OUTLIER):
                print_block(console, f"{host.host}: {reason}", 2)


def print_fleet_verdict(record: Record, path: Path | None, console: Console) -> None:
    """Print the record's path and the verdict."""
    if path is not None:
        console.print(line_of(f"record: {path}"))
    if record.verdict is not None:
        console.print(verdict_word(record))


def print_provision(result: ProvisionResult, console: Console) -> None:
    """Print the drives of every planned host, then the same table of hosts as Ansible's callback."""
    for host, drives in result.tables.items():
        console.print(line_of(f"{host}:"))
        for row in drives.splitlines():
            console.print(Text("  " + row), soft_wrap=True)
    for line in lines(result.hosts, WIDTH):
        shown = Text(line)
        for each, style in STYLES.items():
            shown.highlight_words([f" {each} "], style)
        console.print(shown, soft_wrap=True)
    for note in result.notes:
        console.print(Text(note), soft_wrap=True)


def slowest(hosts: Sequence[tuple[FleetHost, Record | None]]) -> str | None:
    """A line that names the host with the lowest sequential read; None where no host was measured."""
    reads = [(median_of(record, "read"), host.host) for host, record in hosts]
    measured = [(speed, name) for speed, name in reads if speed is not None]
    if not measured:
        return None
    speed, name = min(measured)
    return f"slowest: {name}, sequential read {format_bandwidth(speed)}"


def median_of(record: Record | None, direction: str) -> float | None:
    """The sequential bandwidth in one direction (bytes per second); None where it was not measured."""
    measured = sequential_figures(record.measurements if record else [])
    return next((each.value for way, each in measured.items() if way == direction), None)


def speed(value: float | None) -> str:
    """A bandwidth in bytes per second as a number in GB/s; a dash for None."""
    return "-" if value is None else number(value / 1e9)
