"""Which table and which page belong to a kind of record.

The modules of tables and pages are loaded when a record of their kind is shown: what others need (templates, the plays
of a fleet) takes longer to import than a small copy takes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunetool.bench.registry import BENCHMARKS
from tunetool.node.common.files import replace_file
from tunetool.record import FILE, REPORT, Record, read
from tunetool.regular_files import below
from tunetool.report.lines import without_commands

if TYPE_CHECKING:
    from rich.console import Console

    from tunetool.view.model import View

VIEWS: Mapping[str, str] = {
    **{each.kind: f"tunetool.bench.{each.folder}.view" for each in BENCHMARKS},
    "stage": "tunetool.stage.view",
    "tune": "tunetool.tune.view",
    "verify": "tunetool.verify.view",
}
"""Modules with a function ``view(record, directory)``: all that is shown of a record, on a terminal and on its page.
``directory``: where the record lies, for what lies beside it."""

PAGES: Mapping[str, str] = {
    "fleet": "fleet_page.write_page",
}
"""Functions that write a page, and return its path; None where the record has nothing to show. A command that makes a
record of such a kind writes it."""
ASKED_FOR = ("stage",)
"""Kinds whose page is written where somebody asks for it alone: a copy may take less time than its page."""
ANY_VIEW = "tunetool.view.figures"
"""For all other kinds, where somebody asks for a page; a terminal shows of them what it shows of ``verify``."""


def function(name: str) -> Any:
    """The function ``MODULE.NAME`` of this package."""
    module, _, attribute = name.partition(".")
    return getattr(importlib.import_module(f"tunetool.report.{module}"), attribute)


def view_of(record: Record, path: Path | None, any_view: str = ANY_VIEW) -> View:
    """What is shown of a record; ``path`` is where it lies, ``any_view`` the module for kinds that have none."""
    module = importlib.import_module(VIEWS.get(record.kind, any_view))
    made: View = module.view(record, path.parent if path is not None else None)
    return made


def page_text(record: Record, path: Path | None) -> str:
    """The page of a record, by its view; empty where it has nothing to show."""
    text: str = function("render_html.page")(view_of(record, path), record)
    return text


def markdown_of(record: Record, path: Path | None) -> str:
    """The record in Markdown: its view, or its figures where its kind has none; ``path`` is where it lies."""
    shown = function("render_markdown.markdown") if record.kind in VIEWS else None
    text: str = shown(view_of(record, path), record) if shown else function("flat.record_markdown")(record)
    return without_commands(text)


def print_record(record: Record, path: Path | None, console: Console) -> None:
    """The record for people, by its kind; ``path`` is where it lies."""
    if record.hosts is not None and record.kind not in VIEWS:
        function("table.print_hosts")(record, console)
        function("table.print_fleet_verdict")(record, path, console)
    else:
        shown = view_of(record, path, VIEWS["verify"])
        function("render_terminal.print_view")(shown, record, path, console)


def write_page(record: Record, path: Path | None) -> Path | None:
    """The page beside the record at ``path``; None where its kind has none, or it has nothing to show.

    A health check, which measures nothing, is run every few minutes: its page is written where somebody asks for it.
    """
    unasked = record.kind in ASKED_FOR or (record.kind == "verify" and not record.measurements)
    if path is None or record.kind not in {*PAGES, *VIEWS} or unasked:
        return None
    return _write(record, path)


def write_any_page(record: Record, path: Path) -> Path:
    """The page beside the record at ``path``, of whatever kind it is."""
    page = _write(record, path)
    return page or _replace(path, function("render_html.page")(importlib.import_module(ANY_VIEW).view(record), record))


def _write(record: Record, path: Path) -> Path | None:
    if record.kind not in PAGES:
        _write_parts(record, path.parent)
        text = page_text(record, path)
        return _replace(path, text) if text else None
    write = function(PAGES[record.kind])
    page: Path | None = write(record, _beside(path))
    return page


def _replace(path: Path, text: str) -> Path:
    """Write the page of the record at ``path`` by rename."""
    replace_file(str(_beside(path)), text)
    return _beside(path)


def _beside(path: Path) -> Path:
    """Where the page of the record at ``path`` lies. Records of a fleet's hosts share a directory: a page for each."""
    return path.parent / REPORT if path.name == FILE else path.with_suffix(".html")


def _write_parts(record: Record, directory: Path) -> None:
    """The pages of the parts of a chain, to which its own page leads."""
    for part in record.parts or []:
        if part.run is None:
            continue
        path = below(directory.parent, f"{part.run}/{FILE}")
        shown = read(path) if path.is_file() else None
        # A part is no chain: one that names itself would have no end.
        if shown is not None and shown.kind != record.kind:
            write_page(shown, path)
