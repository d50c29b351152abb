"""Whether a file is unchanged since it was recorded, by its inode, size and times."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_TICK_NS = 20 * 10**6
"""Two writes within one tick of the kernel's clock (10 ms at most) can have the same time."""


class Identity(NamedTuple):
    """A file's inode, size, time of the last write (mtime) and time of the last change of any kind (ctime)."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    @classmethod
    def parse(cls, row: Any) -> Identity:
        """The inverse of ``row``. Raises ``ValueError`` or ``TypeError``."""
        inode, size, mtime_ns, ctime_ns = row
        return cls(int(inode), int(size), int(mtime_ns), int(ctime_ns))

    def row(self) -> list[int]:
        """As a list for JSON."""
        return list(self)

    def as_written(self, other: Identity) -> bool:
        """Whether size and mtime are equal, as they are after the file was moved or linked."""
        return (self.size, self.mtime_ns) == (other.size, other.mtime_ns)


def look(path: Path) -> Identity:
    """The identity of the file at ``path``. Raises ``OSError``."""
    return Identity.of(path.stat())


def look_at(directory: Path, names: Iterable[str] | None = None) -> dict[str, Identity]:
    """The identities of the regular files below ``directory``, or of those of ``names`` that exist.

    Waits until the clock is past the newest of them, so that every later write changes the time.
    """
    if names is None:
        names = [str(path.relative_to(directory)) for path in directory.rglob("*")]
    names = list(names)
    statuses = _statuses(directory, names)
    newest = max((status.st_ctime_ns for status in statuses.values()), default=0)
    remaining_ns = newest + _TICK_NS - time.time_ns()
    if 0 < remaining_ns <= _TICK_NS:
        time.sleep(remaining_ns / 1e9)
        statuses = _statuses(directory, names)
    return {name: Identity.of(status) for name, status in statuses.items()}


def _statuses(directory: Path, names: Iterable[str]) -> dict[str, os.stat_result]:
    statuses = {}
    for name in names:
        try:
            status = (directory / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if stat.S_ISREG(status.st_mode):
            statuses[name] = status
    return statuses


def rows(files: Mapping[str, Identity]) -> dict[str, list[int]]:
    """The identities as lists for JSON."""
    return {name: identity.row() for name, identity in files.items()}


def parsed(document: Mapping[str, Any]) -> dict[str, Identity]:
    """The inverse of ``rows``. Raises ``ValueError``, ``TypeError`` or ``AttributeError``."""
    return {str(name): Identity.parse(row) for name, row in document.items()}
