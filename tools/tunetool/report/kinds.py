"""Which table and which page belong to a kind of record.

The modules of tables and pages are loaded when a record of their kind is shown: what others need (templates, the plays
of a fleet) takes longer to import than a small copy takes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunetool.record import Record, read
from tunetool.regular_files import below
from tunetool.report.page import REPORT

if TYPE_CHECKING:
    from rich.console import Console

PRINTERS: Mapping[str, str] = {
    "bench.checkpoint": "checkpoint.print_checkpoint",
    "bench.ds-io": "ds_io.print_ds_io",
    "bench.finetune": "finetune.print_finetune",
    "bench.loading": "loading.print_loading",
    "bench.reference": "reference.print_reference",
    "bench.staging": "staging.print_staging",
    "bench.strategies": "strategies.print_strategies",
    "stage": "stage.print_stage",
    "tune": "tune.print_tune",
}
"""Functions of (record, path, console). All other kinds are printed as ``verify`` prints its own."""

PAGES: Mapping[str, str] = {
    "bench.checkpoint": "checkpoint_page.write_page",
    "bench.finetune": "finetune_page.write_page",
    "bench.loading": "loading_page.write_page",
    "bench.reference": "reference_page.write_page",
    "bench.staging": "staging_page.write_page",
    "bench.strategies": "strategies_page.write_page",
}
"""Functions that write a page of plots, and return its path; None where the record has nothing to plot."""


def function(name: str) -> Any:
    """The function ``MODULE.NAME`` of this package."""
    module, _, attribute = name.partition(".")
    return getattr(importlib.import_module(f"tunetool.report.{module}"), attribute)


def print_record(record: Record, path: Path | None, console: Console) -> None:
    """The record for people, by its kind; ``path`` is where it lies."""
    if record.hosts is not None and record.kind not in PRINTERS:
        function("table.print_hosts")(record, console)
        function("table.print_fleet_verdict")(record, path, console)
    else:
        function(PRINTERS.get(record.kind, "table.print_verdict"))(record, path, console)


def write_page(record: Record, path: Path | None) -> Path | None:
    """The page of plots beside the record at ``path``; None where its kind has none, or it has no figures."""
    if record.kind not in PAGES or path is None:
        return None
    write = function(PAGES[record.kind])
    page: Path | None
    if record.kind == "bench.finetune":
        page = write(record, path.parent)
    elif record.kind == "bench.reference":
        page = write(record, path.parent / REPORT, _pages_of_parts(record, path.parent))
    else:
        page = write(record, path.parent / REPORT)
    return page


def _pages_of_parts(record: Record, directory: Path) -> dict[str, str]:
    """The pages of the parts, which this writes too, relative to ``directory``, by part."""
    pages = {}
    for part in record.parts or []:
        if part.run is None:
            continue
        path = below(directory.parent, f"{part.run}/record.json")
        shown = read(path) if path.is_file() else None
        # A part is no chain: one that names itself would have no end.
        if shown is not None and shown.kind != record.kind and write_page(shown, path) is not None:
            pages[part.name] = f"../{part.run}/{REPORT}"
    return pages
