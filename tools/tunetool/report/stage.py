"""The result of `tunetool stage` for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tunetool.fleet.same_reasons import same_reasons
from tunetool.node.units import format_bandwidth, format_size
from tunetool.record import FleetHost, Measurement, Record
from tunetool.report import page
from tunetool.view.text import number

BINDS = {
    "cpu": "the CPUs were busy, with this or with other work",
    "source": "reading the source took most of the time",
    "destination": "writing took most of the time",
}
"""What each bottleneck of a copy means."""


def print_stage(record: Record, path: Path | None, console: Console) -> None:
    """Print the copy's figures and checks, then the verdict. ``path``: where the record is."""
    console.print(page.line_of(f"{record.node.host}: `{record.target}`"))
    for measurement in record.measurements:
        for line in _lines(measurement):
            page.print_block(console, line, 2)
    for check in record.checks:
        page.print_block(console, f"{check.status.upper():8}{check.id}: {check.found}; {check.expected}", 8)
        if check.remedy:
            page.print_block(console, f"        remedy: {check.remedy}", 10)
    page.print_verdict_line(record, path, console)


def print_stage_fleet(hosts: Sequence[tuple[FleetHost, Record | None]], console: Console) -> None:
    """Print one line for each host; hosts without a copy and with a reason in common share a line below."""
    groups = same_reasons([host for host, _ in hosts])
    grouped = {name for group in groups for name in group.hosts}
    table = page.new_table()
    table.add_column("host", overflow="fold")
    table.add_column("result")
    page.add_number_columns(table, "GB", "s", "GB/s")
    table.add_column("binds")
    table.add_column("reason", ratio=1, overflow="fold")
    for host, record in hosts:
        figure = record.measurements[0] if record is not None and record.measurements else None
        findings = [check.found for check in record.checks] if record is not None else []
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
        if host.host in grouped and figure is None:
            continue
        reason = "" if host.host in grouped else next(iter([*host.reasons, *findings]), "")
        table.add_row(Text(host.host), page.word(host.status.upper()), *map(Text, cells), Text(reason))
    if table.row_count:
        console.print(table)
    page.print_same_reasons(console, groups, len(hosts))


def _lines(figure: Measurement) -> list[str]:
    parameters = figure.parameters
    size, seconds = format_size(float(parameters["bytes"])), float(parameters["seconds"])
    # A record of an earlier version says nothing of holes.
    holes = int(parameters.get("hole_bytes", 0))
    kept = f", of which {format_size(holes)} stay holes" if holes else ""
    moved = f"{size} in {parameters['files']} files{kept}, {seconds:.2f} s"
    transfer = (
        f"from `{parameters['source']}` ({parameters['source_medium']}) to {figure.medium}"
        if "source" in parameters
        else "read"
    )
    direct = format_size(float(parameters["direct_bytes"]))
    binds = str(parameters["binds"])
    # A record of another version may name what this one does not know.
    meaning = f" ({BINDS[binds]})" if binds in BINDS else ""
    return [
        f"{moved}: {format_bandwidth(figure.value)}; {transfer}",
        f"{parameters['threads']} threads, {parameters['checksum']}; {direct} read past the page cache; reading "
        f"{float(parameters['reading_seconds']):.2f} s, checksums {float(parameters['checksum_seconds']):.2f} s, "
        f"writing {float(parameters['writing_seconds']):.2f} s over all threads; CPU "
        f"{float(parameters['cpu_seconds']):.2f} s on {parameters['cpus']}, which were busy for "
        f"{float(parameters['cpu_busy']):.0%}",
        f"binds: {binds}{meaning}",
    ]
