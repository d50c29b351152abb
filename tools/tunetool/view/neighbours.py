"""What lies beside a record in the runs directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tunetool.errors import UsageProblem
from tunetool.record import FILE, Record, read
from tunetool.regular_files import below

REPORT = "report.html"
"""File name of the HTML page beside a record."""


def newest_beside(runs_dir: Path, kind: str, most: int) -> Iterator[tuple[str, Record]]:
    """Name and record of the newest ``most`` of a kind, as their directories are named; damaged ones are left out."""
    try:
        names = sorted((path.name for path in runs_dir.glob(f"[!.]*-{kind}-*")), reverse=True)
    except OSError:
        return
    for name in names[:most]:
        try:
            record = read(below(runs_dir, f"{name}/{FILE}"))
        except UsageProblem:
            continue
        if record.kind == kind:
            yield name, record
