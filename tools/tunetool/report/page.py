"""What every page for people shares: its width, its lines, and how it writes a number."""

from __future__ import annotations

import textwrap
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tunetool.record import Record

WIDTH = 100
REPORT = "report.html"
"""The page of plots beside a record."""
STYLES = {"PASS": "bold green", "FAIL": "bold red", "FAILED": "bold red", "REFUSED": "bold red"}


def number(value: float) -> str:
    """Four digits that count, never in powers of ten."""
    if value >= 100:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def line_of(text: str) -> Text:
    """A line that is never wrapped."""
    return Text(text, overflow="ignore", no_wrap=True)


def print_block(console: Console, text: str, indent: int) -> None:
    """Text as wide as the page, its further lines indented."""
    for line in textwrap.wrap(
        text, WIDTH, subsequent_indent=" " * indent, break_long_words=False, drop_whitespace=True
    ):
        console.print(line_of(line))


class PipeConsole(Console):
    """A console that raises where nobody reads it any more: rich itself ends the process with 1."""

    def on_broken_pipe(self) -> None:
        """Called by rich while it handles the ``BrokenPipeError``."""
        raise BrokenPipeError


def table_console() -> Console:
    """Standard output, as wide as the table everywhere. rich itself honours NO_COLOR."""
    return PipeConsole(width=WIDTH, highlight=False)


def print_verdict_line(record: Record, path: Path | None, console: Console) -> None:
    """The reasons, where the record lies, and the word."""
    if record.verdict is None:
        return
    told = tuple(f"{check.id}: " for check in record.checks if check.status in ("fail", "unknown"))
    for reason in record.verdict.reasons:
        if not reason.startswith(told):  # a failed check stands above already
            print_block(console, f"- {reason}", 2)
    if path is not None:
        console.print(line_of(f"record: {path}"))
    console.print(verdict_word(record))


def verdict_word(record: Record) -> Text:
    """The word; what was forgiven stands beside it."""
    shown = word(record.verdict.status.upper() if record.verdict else "")
    return Text.assemble(shown, f" (tolerance {record.tolerance * 100:g} %)") if record.tolerance else shown


def word(text: str) -> Text:
    """A verdict's word in its colour."""
    return Text(text, style=STYLES.get(text, ""))
