"""The end of every command that makes a record: write the JSON and the page, print, end with the verdict's code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from tunetool.cli.groups import answering
from tunetool.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from tunetool.record import Record

    Show = Callable[[Record, Path | None, Console], None]


class Outcome(Protocol):
    """A record, where it lies, and the exit code; no record for a dry run."""

    @property
    def record(self) -> Record | None: ...
    @property
    def path(self) -> Path | None: ...
    @property
    def code(self) -> ExitCode: ...


def finish(outcome: Outcome, json_to: str | None, show: Show | None = None) -> int:
    """``show`` prints the record where its kind alone does not say how. Returns the exit code."""
    from tunetool.report.kinds import print_record
    from tunetool.report.page import table_console

    record = outcome.record
    if record is None:
        return int(outcome.code)
    # The record was made and judged, whether or not it can be printed.
    with answering(outcome.code):
        page = _write_page(record, outcome.path)
        write_json(record, json_to)
        if json_to != "-":
            (show or print_record)(record, outcome.path, table_console())
        if page is not None:
            click.echo(f"page: {page}", err=True)
    return int(outcome.code)


def _write_page(record: Record, path: Path | None) -> Path | None:
    """The page beside the record. Without room for it there is still the record, and its verdict."""
    from tunetool.report.kinds import write_page

    try:
        return write_page(record, path)
    except OSError as error:
        click.echo(f"no page was written: {error.strerror or error}", err=True)
        return None


def write_json(record: Record, json_to: str | None) -> None:
    """The record where ``--json`` wants it."""
    from tunetool.record import dumps

    write_text(dumps(record), json_to)


def write_text(document: str, json_to: str | None) -> None:
    """A JSON document where ``--json`` wants it."""
    from tunetool.node.common.files import replace_file

    if json_to == "-":
        sys.stdout.write(document)
    elif json_to is not None:
        replace_file(json_to, document)
