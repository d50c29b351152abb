"""Functions for a rank: report progress, and get its output directory. Standard library only; quick to import.

Without a launcher, ``beat`` does nothing, and ``out`` is a directory below the current one.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

OUT = "TUNETOOL_OUT"
"""A directory on the rank's node; its ``rank-<RANK>`` is copied to the control machine."""
LAUNCHED = "TUNETOOL_LAUNCHED"
NODE = "TUNETOOL_NODE"
"""The directory of the guard on the node."""
BEATS = "beats"
BEAT = struct.Struct("=QQ")
"""Number of beats of a rank, and the time of the last one in nanoseconds of the node's monotonic clock."""

started_at: float = float(os.environ.get(LAUNCHED) or time.time())
"""When the launcher started the ranks, by the clock of this node, in seconds since 1970."""

_number = int(os.environ.get("RANK") or 0)
_beats = 0
_memory: mmap.mmap | None = None


def out() -> Path:
    """This rank's output directory, created if missing. It is copied to the control machine after the run."""
    directory = Path(os.environ.get(OUT) or ".") / f"rank-{_number}"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def beat() -> None:
    """Report progress to the watchdog. Takes a microsecond: call it at every step, and between long parts of
    start-up."""
    global _beats, _memory  # noqa: PLW0603  (a process is one rank)
    if _memory is None:
        node = os.environ.get(NODE)
        if not node:
            return
        _memory = _map(Path(node) / BEATS / str(_number))
    _beats += 1
    BEAT.pack_into(_memory, 0, _beats, time.monotonic_ns())


def touch() -> None:
    """Move the time of the last beat and not their number: for progress that is no step."""
    if _memory is not None:
        BEAT.pack_into(_memory, 0, _beats, time.monotonic_ns())


def _map(path: Path) -> mmap.mmap:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w+b") as stream:
        stream.truncate(BEAT.size)
        return mmap.mmap(stream.fileno(), BEAT.size)
