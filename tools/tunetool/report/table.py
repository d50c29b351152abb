"""A verdict as text of 100 columns: figures with their evidence, failed checks and their remedies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunetool.fleet.outliers import OUTLIER
from tunetool.fleet.provision import ProvisionResult
from tunetool.fleet.same_reasons import same_reasons
from tunetool.measure.aio.rung import CHECK_ID as DEEPSPEED
from tunetool.measure.balance import CHECK_ID as BALANCE
from tunetool.measure.figures import is_sequential, sequential_figures
from tunetool.measure.gds.config import CHECK_ID as GDS_CONFIG
from tunetool.measure.gds.judge import CHECK_ID as GDS
from tunetool.node.common.training_part import CHECK_ID as TRAINING
from tunetool.node.play.host_summary import lines
from tunetool.node.units import format_bandwidth, format_figure
from tunetool.record import Evidence, Expectation, FleetHost, Measurement, Record, chosen
from tunetool.report.ladder import print_ladder
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
from tunetool.verdict import TESTER_CEILING, TESTER_CPU_SHARE
from tunetool.view.text import number

__all__ = [
    "median_of",
    "print_fleet",
    "print_fleet_verdict",
    "print_hosts",
    "print_provision",
    "print_verdict",
    "print_verdict_line",
    "slowest",
    "speed",
    "table_console",
    "word",
]

_DEEPSPEED = "deepspeed"
_GDS = "gds"
_HANDLES = {
    "cpu": "aio",
    "cuda": "aio, HBM",
    "gds": "gds, HBM",
    "direct": "GDS, HBM",
    "compat": "GDS compat",
    "posix": "POSIX, HBM",
}
FIGURE_TITLES = ("sequential", "GB/s", "GiB/s", "from", "to", "expected", "evidence", "medium", "verdict")
_LEFT_OUT = {DEEPSPEED: "deepspeed: left out", GDS: "gds: not proven", TRAINING: "training environment"}


def print_verdict(record: Record, path: Path | None, console: Console) -> None:
    """Print the record of one node. ``path``: where the record is."""
    target = f"`{record.target}`" if record.target else "nothing measured"
    console.print(line_of(f"{record.node.host}: {target}"))
    figures = main_figures(record)
    if figures:
        console.print(_figures_table(record, figures))
    for line in footnotes(record, figures):
        print_block(console, line, 2)
    print_ladder(record, console)
    _print_checks(record, console)
    print_verdict_line(record, path, console)


def main_figures(record: Record) -> list[Measurement]:
    """What `verify` measures at every level: fio's sequential figures, then DeepSpeed's and GPUDirect Storage's."""
    return [
        *(each for each in record.measurements if is_sequential(each)),
        *(each for each in record.measurements if _is_of_handle(each)),
    ]


def _is_of_handle(figure: Measurement) -> bool:
    return figure.labels["subject"] in (_DEEPSPEED, _GDS)


def _figures_table(record: Record, figures: Sequence[Measurement]) -> Table:
    table = new_table()
    for title in FIGURE_TITLES:
        right = title in ("GB/s", "GiB/s", "from", "to", "expected")
        # Wide enough for `md RAID0 (8 x nvme)` on one line.
        least = 19 if title == "medium" else None
        table.add_column(title, justify="right" if right else "left", overflow="fold", min_width=least)
    for cells in figure_rows(record, figures):
        table.add_row(*cells)
    return table


def figure_rows(record: Record, figures: Sequence[Measurement]) -> list[list[Text]]:
    """The cells of each figure, for the columns ``FIGURE_TITLES``."""
    wanted = {expectation.name: expectation for expectation in record.expectations}
    rows = []
    for measurement in figures:
        cells = _figure_cells(measurement, wanted.get(measurement.name))
        if _is_of_handle(measurement):
            share = _share(measurement, figures)
            cells = [Text(figure_name(measurement)), *cells[1:-1], Text(share) if share else cells[-1]]
        rows.append(cells)
    return rows


def proof_of(evidence: Evidence | None) -> str | None:
    """``block 1.0000``, and the worst sample where one proves nothing: it decides, and the sum may hide it."""
    if evidence is None or evidence.ratio is None:
        return None
    worst = "" if evidence.worst_ratio is None else f", once {evidence.worst_ratio:.4f}"
    return f"{evidence.kind} {evidence.ratio:.4f}{worst}"


def figure_name(measurement: Measurement) -> str:
    """Its direction, and which handle moved the bytes where that was not fio."""
    direction = str(measurement.parameters.get("direction", measurement.name))
    if _is_of_handle(measurement):
        return f"{direction}, {_HANDLES.get(str(measurement.parameters.get('device')), '?')}"
    return direction


def _share(measurement: Measurement, figures: Sequence[Measurement]) -> str | None:
    """The measurement as a share of fio's bandwidth in the same direction; None where fio did not run."""
    direction = measurement.parameters["direction"]
    fio = next((m.value for m in figures if is_sequential(m) and m.labels["direction"] == direction), 0.0)
    return f"{measurement.value / fio:.0%} of fio" if fio else None


def _figure_cells(measurement: Measurement, expectation: Expectation | None) -> list[Text]:
    interval = measurement.confidence
    evidence = measurement.evidence
    proof = proof_of(evidence) or "none"
    cells = [
        str(measurement.parameters.get("direction", measurement.name)),
        number(measurement.value / 1e9),
        number(measurement.value / 2**30),
        number(interval.low / 1e9) if interval else "",
        number(interval.high / 1e9) if interval else "",
        number(expectation.value / 1e9) if expectation else "-",
        proof,
        measurement.medium,
    ]
    status = expectation.status if expectation else None
    return [*map(Text, cells), word(status.upper() if status else "not judged")]


def footnotes(record: Record, figures: Sequence[Measurement]) -> list[str]:
    """The ceiling, the expectations, and how each figure was measured: one line each."""
    lines = []
    ceilings = chosen(record.measurements, "ceiling")
    for measurement in ceilings:
        drives = measurement.parameters.get("drives")
        exceeded = any(figure.value > measurement.value for figure in figures)
        note = "; exceeded, so the drives do not use these links (virtual drives?)" if exceeded else ""
        lines.append(f"ceiling of the {drives} drives' links: {format_bandwidth(measurement.value)}{note}")
    if figures and record.target and not ceilings:
        lines.append("ceiling: unknown, the links of these drives are not visible")
    for expectation in record.expectations:
        name, wanted = expectation.name.replace(".", " "), format_figure(expectation.value, expectation.unit)
        lines.append(f"expectation ({expectation.source}): {name} of at least {wanted}")
    if record.tolerance:
        lines.append(f"tolerance: {record.tolerance * 100:g} % of an expectation may be missing")
    for measurement in figures:
        lines.append(_how(measurement))
    return lines


def _how(measurement: Measurement) -> str:
    """How a figure was measured, and whether it drifts."""
    direction, interval, trend = figure_name(measurement), measurement.confidence, measurement.trend
    line = (
        f"{direction}: median, {interval.method} of {measurement.parameters.get('sample_seconds')} s"
        if interval
        else ""
    )
    if interval and interval.level:
        line += f" ({interval.level:.1%} confidence)"
    if trend and trend.significant and trend.change is not None:
        line += f"; {'rising' if trend.change > 0 else 'falling'} by {abs(trend.change):.1%} meanwhile"
    return f"{line}; {measurement.engine}{_tester(measurement)}"


def _tester(measurement: Measurement) -> str:
    """Text: the limits of the program that measured."""
    ceiling, share = (measurement.parameters.get(name) for name in (TESTER_CEILING, TESTER_CPU_SHARE))
    alone = f", without storage {format_bandwidth(float(ceiling))}" if ceiling is not None else ""
    return alone + (f", {float(share):.0%} of its cores busy" if share is not None else "")


def _print_checks(record: Record, console: Console) -> None:
    if all(check.id in (BALANCE, DEEPSPEED, GDS, GDS_CONFIG) for check in record.checks):
        console.print(line_of("configuration checks: skipped, there is no manifest"))
    counts = {
        status: sum(check.status == status for check in record.checks) for status in ("pass", "fail", "unknown", "skip")
    }
    summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    if summary:
        console.print(line_of(f"checks: {summary}"))
    tried = any(check.id == DEEPSPEED for check in record.checks)
    for check in record.checks:
        # Where DeepSpeed was tried, its own line says why it was left out.
        if check.id in _LEFT_OUT and check.status == "skip" and not (check.id == TRAINING and tried):
            line = f"{_LEFT_OUT[check.id]}, {check.found}" + (f"; {check.remedy}" if check.remedy else "")
            print_block(console, line, 2)
        if check.status in ("fail", "unknown"):
            print_block(console, f"{check.status.upper():8}{check.id}: {check.found}", 8)
            print_block(console, f"        expected: {check.expected}", 10)
            if check.remedy:
                print_block(console, f"        remedy: {check.remedy}", 10)


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
        table.add_row(Text(host.host), word(host.status.upper()), Text(speed(read)), Text(speed(write)), Text(reason))
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


def print_hosts(record: Record, console: Console) -> None:
    """Print the hosts of a fleet's record, which has their figures but not their own records."""
    print_fleet([(host, _part(record, host)) for host in record.hosts or []], console)


def _part(record: Record, host: FleetHost) -> Record:
    return record.model_copy(update={"measurements": [m for m in record.measurements if m.host == host.host]})


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
