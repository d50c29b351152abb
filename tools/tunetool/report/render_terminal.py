"""A view on a terminal of any width: tables, notes, advice, and the verdict."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from tunetool.node.common.refusal import on_one_line
from tunetool.record import Record
from tunetool.report.page import STYLES, line_of, new_table, print_block, print_verdict_line
from tunetool.view.model import Cell, Notes, Section, Table, Verbatim, View, cell
from tunetool.view.text import quoted

_INDENT = 2
_GAP = 2
"""Between two columns."""
_TITLE = 8
"""No title is made narrower."""


def print_view(view: View, record: Record, path: Path | None, console: Console) -> None:
    """Print the view of a record, then its verdict. ``path``: where the record is."""
    console.print(line_of(f"{record.node.host}: {quoted(record.target)}" if record.target else record.node.host))
    for line in view.head:
        print_block(console, line, _INDENT)
    for section in view.sections:
        if section.on != "page":
            _print_section(section, console)
    for line in (*(view.advice if view.advice_on != "page" else ()), *view.closing):
        print_block(console, line, _INDENT)
    print_verdict_line(record, path, console)


def _print_section(section: Section, console: Console) -> None:
    for block in section.blocks:
        if isinstance(block, Table) and block.rows and not block.folded:
            console.print(_table(section.title, block, console.width))
        elif isinstance(block, Notes) and block.on != "page":
            for line in block.lines:
                print_block(console, line, _INDENT + len(line) - len(line.lstrip()))
        elif isinstance(block, Verbatim) and not block.folded:
            # To copy, so that it is not folded.
            console.print(Text(on_one_line(block.text)), soft_wrap=True)


def _table(title: str, table: Table, width: int) -> RenderableType:
    made = new_table(width=width)
    rows = [[cell(each) for each in row] for row in table.rows]
    # The first column's own title says less than that of the section.
    heads = _heads([title, *table.titles[1:]], rows, width)
    for number, (each, head) in enumerate(zip(table.titles, heads, strict=True), start=1):
        # Texts stand side by side, and the last has the room.
        ratio = 1 if number == len(heads) and not any(map(table.is_number, table.titles)) else None
        made.add_column(head, justify="right" if table.is_number(each) else "left", overflow="fold", ratio=ratio)
    for number, row in enumerate(rows):
        made.add_row(*map(_text, row), style="bold red" if number in table.lost else None)
    return made


def _heads(titles: Sequence[str], rows: Sequence[Sequence[Cell]], width: int) -> Sequence[str]:
    """The titles; where all have no room, those that are longest beside their cells on several lines, that no name or
    number is broken for them."""
    heads, cells = list(titles), [max(len(each.words) for each in column) for column in zip(*rows, strict=True)]
    for index in sorted(range(len(heads)), key=lambda each: cells[each] - len(titles[each])):
        widths = [max(wide, *map(len, head.split("\n"))) for wide, head in zip(cells, heads, strict=True)]
        needed = sum(widths) + _GAP * (len(widths) - 1)
        if needed <= width:
            break
        room = max(cells[index], _TITLE, len(titles[index]) - (needed - width))
        heads[index] = "\n".join(textwrap.wrap(titles[index], room, break_long_words=False))
    return heads


def _text(each: Cell) -> Text:
    bad = "bold red" if each.mark in ("fail", "error") else ""
    return Text(on_one_line(each.words), style=STYLES.get(each.text, bad))
