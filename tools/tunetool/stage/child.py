"""Copies batches of small files: a program of ``measure/child_server.py``, started by ``moving.py``."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunetool.errors import TunetoolError
from tunetool.stage.ends import DIRECT_BYTES, Tally, move_small
from tunetool.stage.tree import Entry

_buffer = memoryview(mmap.mmap(-1, DIRECT_BYTES))


def answer(order: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the files of ``order``, and return their checksums. See ``moving.Helper.move``."""
    tally = Tally()
    root = None if order["root"] is None else _name(order["root"])
    tree = None if root is None else Path(root)
    digests = []
    try:
        for path, origin, size, mtime_ns, mode, inode, ctime_ns, holes in order["files"]:
            entry = Entry(_name(path), "file", size, mtime_ns, mode, "", _name(origin), inode, ctime_ns, holes)
            digests.append(move_small(entry, tree, str(root), order["checksum"], _buffer, tally))
    except TunetoolError as error:
        return {"refused": error.message, "hint": error.hint}
    return {"digests": digests, "tally": vars(tally), "cpu": time.process_time()}


def _name(text: str) -> str:
    """A file's name as this process's locale has it, from its bytes, one a letter."""
    return os.fsdecode(text.encode("latin-1"))
