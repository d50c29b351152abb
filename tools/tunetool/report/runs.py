"""The records that were kept: finding one by what people call it, and listing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunetool.errors import UsageProblem
from tunetool.node.units import format_count
from tunetool.record import Record, read
from tunetool.report.page import WIDTH
from tunetool.report.table import median_of, speed, word

_FILE = "record.json"


@dataclass(frozen=True)
class Kept:
    """A record's directory; no record where it cannot be read, and then why."""

    name: str
    record: Record | None
    problem: str = ""


def find_record(name: str, runs_dir: Path) -> Path:
    """The record that ``name`` means: a file, its directory, or a directory under ``runs_dir``. ``UsageProblem``."""
    for place in (Path(name), runs_dir / name):
        if place.is_file():
            return place
        if (place / _FILE).is_file():
            return place / _FILE
    raise UsageProblem(f"`{name}` is no record", f"`tunetool report list --runs-dir {runs_dir}` names those there are")


def list_runs(runs_dir: Path, kind: str | None = None) -> list[Kept]:
    """Every record in ``runs_dir``, the newest first; damaged ones too."""
    try:
        names = sorted((path.parent.name for path in runs_dir.glob(f"*/{_FILE}")), reverse=True)
    except OSError as error:
        raise UsageProblem(f"`{runs_dir}` cannot be read: {error.strerror}") from None
    found = []
    for name in names:
        try:
            kept = Kept(name, read(runs_dir / name))
        except UsageProblem as error:
            kept = Kept(name, None, error.message)
        if kind is None or (kept.record is not None and kept.record.kind == kind):
            found.append(kept)
    return found


def print_runs(found: Sequence[Kept], console: Console) -> None:
    """One line for each."""
    if not found:
        console.print("no records")
        return
    table = Table(box=box.SIMPLE_HEAD, width=WIDTH, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for title in ("record", "target"):
        table.add_column(title, overflow="fold")
    for title in ("read GB/s", "write GB/s"):
        table.add_column(title, justify="right")
    table.add_column("verdict")
    for kept in found:
        if kept.record is None:
            table.add_row(Text(kept.name), Text(kept.problem), "-", "-", word("DAMAGED"))
            continue
        record = kept.record
        read_speed, write_speed = (speed(median_of(record, direction)) for direction in ("read", "write"))
        status = record.verdict.status.upper() if record.verdict else "-"
        place = format_count(len(record.hosts), "host") if record.hosts is not None else record.target or "-"
        table.add_row(Text(kept.name), Text(place), read_speed, write_speed, word(status))
    console.print(table)
