"""A view in GitHub's Markdown: the verdict first, then what a terminal shows."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from tunetool.record import Record
from tunetool.report.flat import markdown_table, open_checks, plain
from tunetool.view.model import Notes, Section, Table, Verbatim, View, cell


def markdown(view: View, record: Record) -> str:
    """The text; nothing that a record says is markup."""
    return "\n".join(_parts(view, record))


def _parts(view: View, record: Record) -> Iterator[str]:
    yield f"## {plain(view.title)}\n"
    if record.verdict is not None:
        yield f"**{record.verdict.status.upper()}**, {record.finished:%Y-%m-%d %H:%M} UTC\n"
        if record.verdict.reasons:
            yield _list(record.verdict.reasons)
    if view.head or view.advice:
        yield _list([*view.head, *view.advice])
    for section in view.sections:
        if not section.on:
            yield from _section(section)
    if view.closing:
        yield _list(view.closing)
    if table := open_checks(record):
        yield table
    if record.command:
        yield f"Command: {plain(shlex.join(record.command))}\n"


def _section(section: Section) -> Iterator[str]:
    yield f"### {plain(section.title)}\n"
    for block in section.blocks:
        if isinstance(block, Table) and block.rows and not block.folded:
            yield markdown_table(block.titles, [[cell(each).words for each in row] for row in block.rows])
        elif isinstance(block, Notes) and block.lines and block.on != "page":
            yield _list(block.lines)
        elif isinstance(block, Verbatim) and not block.folded and block.on != "terminal":
            yield f"{plain(block.text)}\n"


def _list(lines: Iterable[str]) -> str:
    return "".join(f"- {plain(line)}\n" for line in lines)
