"""What all tables on a terminal share: their width, style, lines and number format."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tunetool.node.common.refusal import on_one_line
from tunetool.node.play import reasons
from tunetool.record import Record

WIDTH = 100
STYLES = {"PASS": "bold green", "FAIL": "bold red", "FAILED": "bold red", "REFUSED": "bold red"}


def line_of(text: str) -> Text:
    """A line that is never wrapped, without a terminal's commands: what a record says may be anybody's."""
    return Text(on_one_line(text), overflow="ignore", no_wrap=True)


def print_block(console: Console, text: str, indent: int) -> None:
    """Print text folded to the console's width, with ``indent`` blanks before further lines."""
    for line in textwrap.wrap(
        text, console.width, subsequent_indent=" " * indent, break_long_words=False, drop_whitespace=True
    ):
        console.print(line_of(line))


def print_same_reasons(console: Console, groups: Sequence[reasons.SameReason], total: int) -> None:
    """Print one line for all of the ``total`` hosts that have the same reason, and what to do."""
    for group in groups:
        print_block(console, reasons.line(group, total), 2)
        if words := reasons.hint(group):
            print_block(console, f"  hint: {words}", 4)


class PipeConsole(Console):
    """A console that raises ``BrokenPipeError`` when its reader is gone, where rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        """Raise the error again; rich calls this while it handles it."""
        raise BrokenPipeError


class PlainTable(Table):
    """A table whose texts are shown as they are: rich would take `[/red]` in a name of somebody's for markup."""

    def add_column(self, header: RenderableType = "", *more: Any, **named: Any) -> None:
        """As in rich."""
        super().add_column(_plain(header), *more, **named)

    def add_row(self, *cells: RenderableType | None, **named: Any) -> None:
        """As in rich."""
        super().add_row(*map(_plain, cells), **named)


def _plain(cell: Any) -> Any:
    return Text("\n".join(map(on_one_line, cell.split("\n")))) if isinstance(cell, str) else cell


def new_table(width: int = WIDTH) -> Table:
    """An empty table of this width."""
    return PlainTable(box=box.SIMPLE_HEAD, width=width, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))


def add_number_columns(table: Table, *titles: str) -> None:
    """Add right-aligned columns for figures."""
    for title in titles:
        table.add_column(title, justify="right")


def table_console() -> Console:
    """A console on standard output: as wide as the terminal, or 100 columns where it is none. rich honours NO_COLOR."""
    return PipeConsole(width=None if sys.stdout.isatty() else WIDTH, highlight=False)


def print_verdict_line(record: Record, path: Path | None, console: Console) -> None:
    """Print the verdict's reasons, the record's path, and the verdict. Nothing for a record without a verdict."""
    if record.verdict is None:
        return
    shown_above = tuple(f"{check.id}: " for check in record.checks if check.status in ("fail", "unknown"))
    for reason in record.verdict.reasons:
        if not reason.startswith(shown_above):  # a failed check is printed above already
            print_block(console, f"- {reason}", 2)
    if path is not None:
        console.print(line_of(f"record: {path}"))
    console.print(verdict_word(record))


def verdict_word(record: Record) -> Text:
    """The verdict in its colour, with the tolerance that it used."""
    shown = word(record.verdict.status.upper() if record.verdict else "")
    return Text.assemble(shown, f" (tolerance {record.tolerance * 100:g} %)") if record.tolerance else shown


def word(text: str) -> Text:
    """A verdict such as PASS in its colour."""
    return Text(text, style=STYLES.get(text, ""))
