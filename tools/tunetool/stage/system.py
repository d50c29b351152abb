"""System calls that Python does not wrap: exchange of two names, syncfs, page cache residency."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_FAILED = ctypes.c_void_p(-1).value
_RESIDENT = bytes(value & 1 for value in range(256))
SECTOR = 4096
"""Offsets, lengths and buffers of direct I/O are multiples of this; no drive asks for more."""


def exchange(first: Path, second: Path) -> bool:
    """Exchange two names atomically. False if the file system cannot (renameat2(2): EINVAL). Raises ``OSError``."""
    if not hasattr(_LIBC, "renameat2"):
        return False
    status = _LIBC.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if status == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(number, os.strerror(number), str(first))


def flush(directory: Path) -> None:
    """Flush the file system of ``directory`` to its medium (syncfs(2)). Raises ``OSError``, also for write errors."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _LIBC.syncfs(handle) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(directory))
    finally:
        os.close(handle)


def in_page_cache(handle: int, offset: int, length: int) -> bool:
    """Whether most of these bytes are in the page cache. ``offset`` is a multiple of the page.

    For a user who neither owns the file nor may write to it, the kernel always answers "yes" (mincore(2)); this
    function then returns False.
    """
    if length == 0 or not _may_ask(handle):
        return False
    address = _LIBC.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, handle, offset)
    if address in (None, _FAILED):
        return False
    try:
        pages = -(-length // mmap.PAGESIZE)
        answer = ctypes.create_string_buffer(pages)
        if _LIBC.mincore(address, length, answer) != 0:
            return False
        return answer.raw.translate(_RESIDENT).count(1) * 2 > pages
    finally:
        _LIBC.munmap(address, length)


def _may_ask(handle: int) -> bool:
    user = os.geteuid()
    return user in (0, os.fstat(handle).st_uid) or os.access(f"/proc/self/fd/{handle}", os.W_OK)


@contextlib.contextmanager
def direct(path: str, flags: int) -> Iterator[int | None]:
    """The file opened with O_DIRECT; None if its file system does not support it."""
    try:
        handle = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)
