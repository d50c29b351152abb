"""Copies one small file in as few steps of the interpreter as possible: those are what a tree of such files costs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from tunetool.stage.ends import read_small, write_small
from tunetool.stage.pieces import Checksum, digest_of
from tunetool.stage.tree import Entry


@dataclass
class Tally:
    """The work of one thread, or of all threads. Seconds are summed over threads."""

    bytes: int = 0
    direct_bytes: int = 0
    hole_bytes: int = 0
    """Zeros in the holes of the source, which were not written."""
    reading: float = 0.0
    summing: float = 0.0
    writing: float = 0.0
    helper_cpu: float = 0.0
    """CPU seconds of other processes that worked for it."""

    def add(self, other: Tally) -> None:
        """Add the figures of ``other`` to this one."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def move_small(entry: Entry, tree: Path | None, root: str, checksum: Checksum, buffer: memoryview, tally: Tally) -> str:
    """Read a file that fits into ``buffer``, and write it below ``tree``, if there is one. Returns its checksum.

    ``root``: ``tree`` as text, since a path object takes longer to make than a small file takes to write. Raises
    ``CannotJudge``.
    """
    start = time.perf_counter()
    data = read_small(entry, buffer, as_listed=tree is not None)
    read = time.perf_counter()
    digest = digest_of(checksum, data)
    summed = time.perf_counter()
    if tree is not None:
        tally.hole_bytes += write_small(entry, tree, f"{root}/{entry.path}", data)
    tally.reading += read - start
    tally.summing += summed - read
    tally.writing += time.perf_counter() - summed
    tally.bytes += entry.size
    return digest
