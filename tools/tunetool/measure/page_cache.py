"""Syncs a checkpoint's files and drops them from the page cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tunetool.measure.aio.readback import drop_file

__all__ = ["HOW", "drop", "drop_file", "files_under", "size_of"]

HOW = "fsync and posix_fadvise(DONTNEED) on each file"


def files_under(directory: Path) -> Iterator[Path]:
    """Regular files, at any depth."""
    return (path for path in sorted(directory.rglob("*")) if path.is_file() and not path.is_symlink())


def size_of(directory: Path) -> int:
    """Bytes of all files together."""
    return sum(path.stat().st_size for path in files_under(directory))


def drop(directory: Path) -> None:
    """Sync and drop all files, so that the drives answer a restore; the drives' counters prove it."""
    for path in files_under(directory):
        drop_file(path)
