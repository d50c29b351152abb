"""The records in the runs directory: find one by its name, and list them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tunetool.errors import UsageProblem
from tunetool.node.units import format_count
from tunetool.record import FILE, Record, read
from tunetool.report.page import add_number_columns, new_table
from tunetool.report.table import median_of, speed, word


@dataclass(frozen=True)
class Kept:
    """A directory of the runs directory; without a record and with the ``problem`` where it cannot be read."""

    name: str
    record: Record | None
    problem: str = ""


def find_record(name: str, runs_dir: Path) -> Path:
    """Path of the record called ``name``: a file, its directory, or a directory under ``runs_dir``.

    Raises ``UsageProblem`` where there is none.
    """
    for path in (Path(name), runs_dir / name):
        if path.is_file():
            return path
        if (path / FILE).is_file():
            return path / FILE
    raise UsageProblem(f"`{name}` is not a record", f"`tunetool report list --runs-dir {runs_dir}` lists all records")


def list_runs(runs_dir: Path, kind: str | None = None) -> list[Kept]:
    """Every record in ``runs_dir``, damaged ones too, the newest first; with ``kind`` only those of that kind."""
    try:
        # A hidden one is not finished yet.
        names = sorted((path.parent.name for path in runs_dir.glob(f"[!.]*/{FILE}")), reverse=True)
    except OSError as error:
        raise UsageProblem(f"`{runs_dir}` cannot be read: {error.strerror}") from None
    runs = []
    for name in names:
        try:
            kept = Kept(name, read(runs_dir / name))
        except UsageProblem as error:
            kept = Kept(name, None, error.message)
        if kind is None or (kept.record is not None and kept.record.kind == kind):
            runs.append(kept)
    return runs


def print_runs(runs: Sequence[Kept], console: Console) -> None:
    """Print one line for each record."""
    if not runs:
        console.print("no records")
        return
    table = new_table()
    for title in ("record", "target"):
        table.add_column(title, overflow="fold")
    add_number_columns(table, "read GB/s", "write GB/s")
    table.add_column("verdict")
    for kept in runs:
        if kept.record is None:
            table.add_row(Text(kept.name), Text(kept.problem), "-", "-", word("DAMAGED"))
            continue
        record = kept.record
        read_speed, write_speed = (speed(median_of(record, direction)) for direction in ("read", "write"))
        status = record.verdict.status.upper() if record.verdict else "-"
        target = format_count(len(record.hosts), "host") if record.hosts is not None else record.target or "-"
        table.add_row(Text(kept.name), Text(target), read_speed, write_speed, word(status))
    console.print(table)
