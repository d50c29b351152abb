"""What a rank may ask of, and tells, whoever launched it. Standard library alone; quick to import.

Outside of a launch ``beat`` does nothing, and ``out`` is a directory under the current one.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

OUT = "TUNETOOL_OUT"
"""A directory on the rank's node; what is in its ``rank-<RANK>`` comes back to the control machine."""
LAUNCHED = "TUNETOOL_LAUNCHED"
NODE = "TUNETOOL_NODE"
"""The launcher's own directory on the node."""
BEATS = "beats"
BEAT = struct.Struct("=QQ")
"""How often a rank has beaten, and when last: nanoseconds of the node's monotonic clock."""

started_at: float = float(os.environ.get(LAUNCHED) or time.time())
"""When the launcher started the ranks, by the clock of this node: seconds since the epoch."""

_number = int(os.environ.get("RANK") or 0)
_beats = 0
_memory: mmap.mmap | None = None


def out() -> Path:
    """This rank's own directory, which is there. What is written here is brought to the control machine."""
    directory = Path(os.environ.get(OUT) or ".") / f"rank-{_number}"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def beat() -> None:
    """Tell the watchdog of progress. Costs a microsecond: call it at every step, and between long parts of a start."""
    global _beats, _memory  # noqa: PLW0603  (a process is one rank)
    if _memory is None:
        node = os.environ.get(NODE)
        if not node:
            return
        _memory = _map(Path(node) / BEATS / str(_number))
    _beats += 1
    BEAT.pack_into(_memory, 0, _beats, time.monotonic_ns())


def _map(path: Path) -> mmap.mmap:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w+b") as stream:
        stream.truncate(BEAT.size)
        return mmap.mmap(stream.fileno(), BEAT.size)
