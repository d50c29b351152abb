"""Whether a directory is in memory, where O_DIRECT only causes another copy."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_TMPFS = 0x01021994
"""The kernel's number of this kind (linux/magic.h)."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.statfs.argtypes = (ctypes.c_char_p, ctypes.c_void_p)


def is_in_memory(directory: Path) -> bool:
    """Whether a tmpfs holds the directory, or a block device that is memory."""
    status = (ctypes.c_long * 64)()
    # The first field, in every layout of this structure that glibc and musl have on 64 bits.
    if not _libc.statfs(os.fsencode(directory), status) and status[0] == _TMPFS:
        return True
    from tunetool.node.machine.block_stack import read_stack  # noqa: PLC0415  a load from a tmpfs needs none of it

    return read_stack(str(directory)).in_memory
