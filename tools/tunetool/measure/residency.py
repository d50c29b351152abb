"""How much of a file the page cache holds (mincore(2))."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_FAILED = ctypes.c_void_p(-1).value
_RESIDENT = bytes(value & 1 for value in range(256))
_STEP = 2**30
"""Bytes that are looked at at once."""


def in_page_cache(handle: int, offset: int, length: int) -> bool:
    """Whether most of these bytes are in the page cache. ``offset`` is a multiple of the page."""
    return length > 0 and 2 * resident_pages(handle, offset, length) > -(-length // mmap.PAGESIZE)


def resident_pages(handle: int, offset: int, length: int) -> int:
    """Number of pages of this range that are in the page cache. ``offset`` is a multiple of the page.

    For a user who neither owns the file nor may write to it, the kernel always answers "all" (mincore(2)); this
    function then returns 0.
    """
    if length == 0 or not _may_ask(handle):
        return 0
    address = _LIBC.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, handle, offset)
    if address in (None, _FAILED):
        return 0
    try:
        answer = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
        if _LIBC.mincore(address, length, answer) != 0:
            return 0
        return answer.raw.translate(_RESIDENT).count(1)
    finally:
        _LIBC.munmap(address, length)


def resident_bytes(directory: Path) -> tuple[int, int]:
    """Bytes that the page cache holds of the regular files under ``directory``, and their size."""
    resident = total = 0
    for path in directory.rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            size = os.fstat(handle).st_size
            total += size
            for offset in range(0, size, _STEP):
                length = min(_STEP, size - offset)
                resident += min(length, mmap.PAGESIZE * resident_pages(handle, offset, length))
        finally:
            os.close(handle)
    return resident, total


def _may_ask(handle: int) -> bool:
    user = os.geteuid()
    return user in (0, os.fstat(handle).st_uid) or os.access(f"/proc/self/fd/{handle}", os.W_OK)
