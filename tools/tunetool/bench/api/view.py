"""The result of `bench api` for people: a table of calls, one of speeds, and what to do about what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tunetool.node.units import format_size_binary
from tunetool.record import CheckResult, Measurement, Record
from tunetool.report.page import add_number_columns, line_of, new_table, print_block, word
from tunetool.report.table import print_verdict_line
from tunetool.view.text import number

_MISUSE = "misuse"
_WORDS = {"pass": "PASS", "fail": "FAIL", "skip": "skip", "unknown": "unknown"}
_MISUSE_WORDS = {**_WORDS, "pass": "refused", "fail": "HARM"}


def print_api(record: Record, path: Path | None, console: Console) -> None:
    """Print the tables with their remedies, then the verdict. ``path``: where the record is."""
    console.print(line_of(f"{record.node.host}: `{record.target}`"))
    misuses = [check for check in record.checks if check.labels.get("group") == _MISUSE]
    calls = [check for check in record.checks if check not in misuses]
    if all(check.status == "skip" for check in record.checks):
        calls, misuses = calls[:1], []
    for title, checks, words in (("call", calls, _WORDS), ("wrong use", misuses, _MISUSE_WORDS)):
        if checks:
            console.print(_of_checks(title, checks, words))
        for check in checks:
            _print_remedy(check, console)
    if record.measurements:
        console.print(_of_figures(record.measurements))
    print_verdict_line(record, path, console)


def _of_checks(title: str, checks: Sequence[CheckResult], words: dict[str, str]) -> Table:
    table = new_table()
    table.add_column(title, no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what it does", ratio=1, overflow="fold")
    for check in checks:
        table.add_row(_name(check), word(words[check.status]), check.found or "")
    return table


def _print_remedy(check: CheckResult, console: Console) -> None:
    if check.remedy and check.status in ("fail", "unknown", "skip"):
        print_block(console, f"{_name(check)}: {check.remedy}", 2)


def _name(check: CheckResult) -> str:
    group = "" if check.labels.get("group") == _MISUSE else f"{check.labels.get('group')}."
    return f"{group}{check.labels['call']}" if "call" in check.labels else "version"


def _of_figures(figures: Sequence[Measurement]) -> Table:
    table = new_table()
    table.add_column("calls, one file")
    add_number_columns(table, "threads", "in flight", "GB/s", "from", "to", "evidence")
    table.add_column("medium")
    for figure in figures:
        interval, proof = figure.confidence, figure.evidence
        parameters = figure.parameters
        size = format_size_binary(float(parameters["file_bytes"]))
        table.add_row(
            f"{figure.labels['way']}, {figure.labels['direction']}, {size}",
            str(parameters["intra_op_parallelism"]),
            str(parameters["pending"]),
            number(figure.value / 1e9),
            number(interval.low / 1e9) if interval else "-",
            number(interval.high / 1e9) if interval else "-",
            f"{proof.kind} {proof.ratio:.4f}" if proof and proof.ratio is not None else "none",
            figure.medium,
        )
    return table
