"""The copies of `tunetool stage` on many hosts: one line for each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from tunetool.fleet.same_reasons import same_reasons
from tunetool.record import FleetHost, Record
from tunetool.report import page
from tunetool.view.text import number


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
