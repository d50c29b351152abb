"""What `tunetool stage` did, for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunetool.node.units import format_bandwidth, format_size
from tunetool.record import FleetHost, Measurement, Record
from tunetool.report.page import WIDTH, line_of, number, print_block, print_verdict_line, word

_BINDS = {
    "cpu": "the CPUs were busy, with this or with other work",
    "source": "reading the source took most of the time",
    "destination": "writing took most of the time",
}


def print_stage(record: Record, path: Path | None, console: Console) -> None:
    """The copy with its figures, or what was found."""
    console.print(line_of(f"{record.node.host}: `{record.target}`"))
    for measurement in record.measurements:
        for line in _lines(measurement):
            print_block(console, line, 2)
    for check in record.checks:
        print_block(console, f"{check.status.upper():8}{check.id}: {check.found}; {check.expected}", 8)
        if check.remedy:
            print_block(console, f"        remedy: {check.remedy}", 10)
    print_verdict_line(record, path, console)


def print_stage_fleet(hosts: Sequence[tuple[FleetHost, Record | None]], console: Console) -> None:
    """One line for each host."""
    table = Table(box=box.SIMPLE_HEAD, width=WIDTH, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("host", overflow="fold")
    table.add_column("result")
    for title in ("GB", "s", "GB/s"):
        table.add_column(title, justify="right")
    table.add_column("binds")
    table.add_column("reason", ratio=1, overflow="fold")
    for host, record in hosts:
        figure = record.measurements[0] if record is not None and record.measurements else None
        said = [check.found for check in record.checks] if record is not None else []
        cells = (
            [
                number(float(figure.parameters["bytes"]) / 1e9),
                number(float(figure.parameters["seconds"])),
                number(figure.value / 1e9),
                str(figure.parameters["binds"]),
            ]
            if figure is not None
            else ["-"] * 4
        )
        reason = next(iter([*host.reasons, *said]), "")
        table.add_row(Text(host.host), word(host.status.upper()), *map(Text, cells), Text(reason))
    console.print(table)


def _lines(figure: Measurement) -> list[str]:
    told = figure.parameters
    moved = f"{format_size(float(told['bytes']))} in {told['files']} files, {float(told['seconds']):.2f} s"
    way = f"from `{told['source']}` ({told['source_medium']}) to {figure.medium}" if "source" in told else "read"
    direct = format_size(float(told["direct_bytes"]))
    return [
        f"{moved}: {format_bandwidth(figure.value)}; {way}",
        f"{told['threads']} threads, {told['checksum']}; {direct} read past the page cache; reading "
        f"{float(told['reading_seconds']):.2f} s, checksums {float(told['checksum_seconds']):.2f} s, writing "
        f"{float(told['writing_seconds']):.2f} s over all threads; CPU {float(told['cpu_seconds']):.2f} s on "
        f"{told['cpus']}, which were busy for {float(told['cpu_busy']):.0%}",
        f"binds: {told['binds']} ({_BINDS[str(told['binds'])]})",
    ]
