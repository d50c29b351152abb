"""Which table and which page belong to a kind of record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from tunetool.record import Record, read
from tunetool.report import checkpoint_page, finetune_page, reference_page, staging_page, strategies_page
from tunetool.report.checkpoint import print_checkpoint
from tunetool.report.ds_io import print_ds_io
from tunetool.report.finetune import print_finetune
from tunetool.report.page import REPORT
from tunetool.report.reference import print_reference
from tunetool.report.stage import print_stage
from tunetool.report.staging import print_staging
from tunetool.report.strategies import print_strategies
from tunetool.report.table import print_fleet_verdict, print_hosts, print_verdict
from tunetool.report.tune import print_tune

PRINTERS: Mapping[str, Callable[[Record, Path | None, Console], None]] = {
    "bench.checkpoint": print_checkpoint,
    "bench.ds-io": print_ds_io,
    "bench.finetune": print_finetune,
    "bench.reference": print_reference,
    "bench.staging": print_staging,
    "bench.strategies": print_strategies,
    "stage": print_stage,
    "tune": lambda record, path, console: print_tune(record, path, None, console),
}
"""All others are printed as ``verify`` prints its own."""


def _write_reference(record: Record, directory: Path) -> Path | None:
    """The page over all parts, which leads to the pages of the parts, written too."""
    pages = {}
    for part in record.parts or []:
        path = directory.parent / (part.run or "") / "record.json"
        if part.run and path.is_file() and write_page(read(path), path) is not None:
            pages[part.name] = f"../{part.run}/{REPORT}"
    return reference_page.write_page(record, directory / REPORT, pages)


PAGES: Mapping[str, Callable[[Record, Path], Path | None]] = {
    "bench.checkpoint": lambda record, directory: checkpoint_page.write_page(record, directory / REPORT),
    "bench.finetune": finetune_page.write_page,
    "bench.reference": _write_reference,
    "bench.staging": lambda record, directory: staging_page.write_page(record, directory / REPORT),
    "bench.strategies": lambda record, directory: strategies_page.write_page(record, directory / REPORT),
}


def print_record(record: Record, path: Path | None, console: Console) -> None:
    """The record for people, by its kind; ``path`` is where it lies."""
    if record.hosts is not None and record.kind not in PRINTERS:
        print_hosts(record, console)
        print_fleet_verdict(record, path, console)
    else:
        PRINTERS.get(record.kind, print_verdict)(record, path, console)


def write_page(record: Record, path: Path | None) -> Path | None:
    """The page of plots beside the record at ``path``; None where its kind has none, or it has no figures."""
    make = PAGES.get(record.kind)
    return make(record, path.parent) if make is not None and path is not None else None
