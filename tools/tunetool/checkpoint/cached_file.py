"""Reads from a file what the page cache holds, and nothing else."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from tunetool.regular_files import open_regular

_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_FAILED = ctypes.c_void_p(-1).value


class CachedFile:
    """A file that is read where all pages of a range are in the page cache, by mincore(2). Threads may share it.

    Not by RWF_NOWAIT, which makes the kernel read ahead from the drives. Raises ``OSError``.
    """

    def __init__(self, path: Path) -> None:
        self.handle = open_regular(path)
        status = os.fstat(self.handle)
        self._size, self._address = status.st_size, None
        # Of others' files that this user may not write, the kernel calls every page resident.
        if self._size and (os.geteuid() in (0, status.st_uid) or os.access(path, os.W_OK)):
            address = _libc.mmap(None, self._size, mmap.PROT_READ, mmap.MAP_SHARED, self.handle, 0)
            self._address = None if address == _FAILED else address

    def read(self, view: memoryview, offset: int) -> int | None:
        """Fill ``view`` from ``offset`` on, up to the end of file; returns the number of bytes. None if the page cache
        lacks a part or nothing says. ``offset`` is a multiple of a page."""
        stop = min(offset + len(view), self._size)
        if self._address is None or offset % _PAGE or stop <= offset:
            return None
        pages = -(-(stop - offset) // _PAGE)
        resident = ctypes.create_string_buffer(pages)
        if _libc.mincore(self._address + offset, stop - offset, resident) or resident.raw.count(1) < pages:
            return None
        done = 0
        while done < len(view) and (count := os.preadv(self.handle, [view[done:]], offset + done)):
            done += count
        return done

    def close(self) -> None:
        if self._address is not None:
            _libc.munmap(self._address, self._size)
            self._address = None
        os.close(self.handle)
