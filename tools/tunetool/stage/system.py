"""System calls that Python does not wrap: exchange of two names, a rename that replaces nothing, syncfs."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCHANGE = -100, 1, 2
SECTOR = 4096
"""Offsets, lengths and buffers of direct I/O are multiples of this; no drive asks for more."""


def exchange(first: Path, second: Path) -> bool:
    """Exchange two names atomically. False if the file system cannot (renameat2(2): EINVAL). Raises ``OSError``."""
    return _renameat2(first, second, _RENAME_EXCHANGE)


def rename_to_new(directory: Path, name: Path) -> None:
    """Rename a directory that is not empty to a name that nothing has. Raises ``FileExistsError``, ``OSError``.

    Where the file system cannot promise that, an empty directory of that name is replaced.
    """
    if _renameat2(directory, name, _RENAME_NOREPLACE):
        return
    try:
        directory.rename(name)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(name)) from None
        raise


def _renameat2(first: Path, second: Path, how: int) -> bool:
    if not hasattr(_LIBC, "renameat2"):
        return False
    status = _LIBC.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), how)
    if status == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
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
