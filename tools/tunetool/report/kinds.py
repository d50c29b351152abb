"""Which table and which page belong to a kind of record.

The modules of tables and pages are loaded when a record of their kind is shown: what others need (templates, the plays
of a fleet) takes longer to import than a small copy takes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunetool.bench.registry import BENCHMARKS
from tunetool.errors import UsageProblem
from tunetool.node.common.files import replace_file
from tunetool.record import FILE, REPORT, Record, host_file, read
from tunetool.regular_files import below

if TYPE_CHECKING:
    from rich.console import Console

    from tunetool.view.model import View

_ACCEPTANCE = "acceptance"
VIEWS: Mapping[str, str] = {
    **{each.kind: f"tunetool.bench.{each.folder}.view" for each in BENCHMARKS},
    _ACCEPTANCE: "tunetool.accept.view",
    "fleet": "tunetool.fleet.view",
    "stage": "tunetool.stage.view",
    "tune": "tunetool.tune.view",
    "verify": "tunetool.verify.view",
}
"""Modules with a function ``view(record, directory)``: all that is shown of a record, on a terminal and on its page.
``directory``: where the record lies, for what lies beside it."""

_BENCHMARKS = frozenset(each.kind for each in BENCHMARKS)

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
    if record.goals and record.kind != _ACCEPTANCE:
        section = importlib.import_module(VIEWS[_ACCEPTANCE]).goals_section(record.goals)
        made = replace(made, sections=[*made.sections, section])
    if record.kind not in _BENCHMARKS:
        return made
    left_open: list[str] = function("undecided.what_is_open")(record)
    return replace(made, advice=[*left_open, *made.advice]) if left_open else made


def page_text(record: Record, path: Path | None) -> str:
    """The page of a record, by its view; empty where it has nothing to show."""
    text: str = function("render_html.page")(view_of(record, path), record)
    return text


def markdown_of(record: Record, path: Path | None) -> str:
    """The record in Markdown, by its view; ``path`` is where it lies."""
    text: str = function("render_markdown.markdown")(view_of(record, path), record)
    return text


def print_record(record: Record, path: Path | None, console: Console) -> None:
    """The record for people, by its kind; ``path`` is where it lies."""
    shown = view_of(record, path, VIEWS["verify"])
    function("render_terminal.print_view")(shown, record, path, console)


def write_page(record: Record, path: Path | None) -> Path | None:
    """The page beside the record at ``path``; None where its kind has none, or it has nothing to show.

    A health check, which measures nothing, is run every few minutes: its page is written where somebody asks for it.
    """
    unasked = record.kind in ASKED_FOR or (record.kind == "verify" and not record.measurements)
    if path is None or record.kind not in VIEWS or unasked:
        return None
    return _write(record, path)


def write_any_page(record: Record, path: Path) -> Path:
    """The page beside the record at ``path``, of whatever kind it is."""
    page = _write(record, path)
    return page or _replace(path, function("render_html.page")(importlib.import_module(ANY_VIEW).view(record), record))


def _write(record: Record, path: Path) -> Path | None:
    _write_parts(record, path.parent)
    if record.hosts is not None:
        write_host_pages(record, path.parent)
    text = page_text(record, path)
    return _replace(path, text) if text else None


def write_host_pages(record: Record, directory: Path) -> dict[str, Path]:
    """Write the page of each host whose own record lies below the ``directory``; return them by host.

    One that cannot be written is left out: the fleet's page has the host all the same.
    """
    pages: dict[str, Path] = {}
    for host in record.hosts or []:
        try:
            path = below(directory, host_file(host.host))
            own = read(path)
            # A host's record is of one node: one that has hosts would have pages of its own, and so on.
            if own.hosts is None:
                pages[host.host] = write_any_page(own, path)
        except (OSError, UsageProblem):
            continue
    return pages


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
