"""Checks that a file holds what was written: a sparse or short one is read without a drive."""

from __future__ import annotations

from pathlib import Path

from tunetool.node.units import format_size

_STAT_BLOCK = 512
"""``st_blocks`` counts in units of 512 bytes, whatever the file system's block (stat(2))."""


def incomplete(directory: Path, names: list[str], size: int) -> list[str]:
    """What is wrong with the files, a line for each that holds less than ``size`` bytes."""
    problems = []
    for name in names:
        try:
            status = (directory / name).stat()
        except OSError as error:
            problems.append(f"`{name}` is gone: {error.strerror}")
            continue
        stored = min(status.st_size, status.st_blocks * _STAT_BLOCK)
        if stored < size:
            shortfall = f"`{name}` holds {format_size(stored)} of the {format_size(size)} that were written to it"
            problems.append(f"{shortfall}: a sparse, short or compressed file proves nothing")
    return problems
