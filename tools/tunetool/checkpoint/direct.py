"""Files written past the page cache (O_DIRECT) where the file system can, from plain Python threads.

``os.pwrite`` lets other threads run while it waits, so a few threads with large blocks fill a fast array; no library is
needed. Lengths and offsets are whole blocks of 4096 bytes; a file keeps its last block whole, its end is zeros.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tunetool.checkpoint.created import Created
from tunetool.checkpoint.items import BLOCK
from tunetool.node.machine.block_stack import read_stack

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tunetool.checkpoint.gds import Registered
from tunetool.checkpoint.write_failed import WriteFailed

_T = TypeVar("_T")
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def pages(count: int) -> mmap.mmap:
    """``count`` bytes of private memory, zeroed, that begin at a page."""
    return mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def memory_at(address: int, count: int) -> memoryview:
    """The bytes there, as they are. Whoever calls keeps them alive."""
    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")


_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def _fallocate(handle: int, size: int) -> bool:
    """False where the file system has none; ``os.posix_fallocate`` would then write every block by hand."""
    while _libc.fallocate(handle, 0, 0, size):
        number = ctypes.get_errno()
        if number in _UNSUPPORTED:
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return True


def _nameless(directory: Path) -> int:
    """A handle of a file that has no name, or (NFS) loses it at once, so that a crash leaves nothing."""
    try:
        return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (*_UNSUPPORTED, errno.EISDIR):
            raise
    handle, name = tempfile.mkstemp(dir=directory, prefix=".tunetool-probe.")
    Path(name).unlink()
    return handle


class Target:
    """What a directory's file system takes; asked once, with a file that is gone at once.

    ``direct``: O_DIRECT works. ``memory_alignment``: of what is written, in bytes; many drives take any multiple of 4,
    a file system in the page cache takes anything. ``preallocates``: room is taken before the first byte is written,
    except in memory, where that would zero every page first.
    """

    _known: dict[int, tuple[bool, int]] = {}  # noqa: RUF012  by device number, for the whole process

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        in_memory = read_stack(str(directory)).in_memory
        self.preallocates = not in_memory
        # Newer kernels take O_DIRECT on a tmpfs too, where it changes nothing.
        self.direct, self.memory_alignment = (False, 1) if in_memory else self._ask(directory)

    @classmethod
    def _ask(cls, directory: Path) -> tuple[bool, int]:
        device = directory.stat().st_dev
        if device not in cls._known:
            try:
                handle = _nameless(directory)
                try:
                    cls._known[device] = cls._try(handle)
                finally:
                    os.close(handle)
            except OSError as error:
                raise WriteFailed.of(directory, "trying a direct write there", error) from error
        return cls._known[device]

    @staticmethod
    def _try(handle: int) -> tuple[bool, int]:
        """torch's allocator gives multiples of 64; whether that is enough only a write tells."""
        with pages(4 * BLOCK) as memory, memoryview(memory) as view:
            try:
                fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_DIRECT)
                os.pwrite(handle, view[:BLOCK], 0)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                return False, 1
            for alignment in (64, 512):
                try:
                    os.pwrite(handle, view[alignment : alignment + 2 * BLOCK], 0)
                except OSError as error:
                    if error.errno not in _UNSUPPORTED:
                        raise
                else:
                    return True, alignment
        return True, BLOCK


class DataFile:
    """A new file of ``size`` bytes, a multiple of 4096. Raises ``WriteFailed``, and then has left no file; nothing is
    ever half reported."""

    def __init__(self, path: Path, size: int, target: Target, gds: bool = False) -> None:
        self.path, self.size = path, size
        self._registered: Registered | None = None
        direct = os.O_DIRECT if target.direct else 0
        self._handle = self._told(
            "creating it",
            lambda: os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | direct, 0o666),
        )
        self.created = Created.at(path, self._handle)
        try:
            preallocated = target.preallocates and self._told(
                f"preallocating {size} bytes", lambda: _fallocate(self._handle, size)
            )
            if not preallocated:
                self._told("setting its size", lambda: os.ftruncate(self._handle, size))
            if gds:
                from tunetool.checkpoint.gds import Registered  # noqa: PLC0415  GPU nodes alone have cuFile

                self._registered = Registered(self._handle, path)
        except BaseException:
            self.close()
            self.created.remove()
            raise

    def write(self, view: Buffer, offset: int) -> None:
        """All of ``view`` at ``offset``, both whole blocks."""
        rest = memoryview(view)
        while rest:
            # `_told` calls it at once, so that the loop's variables are still these.
            done = self._told(f"writing {len(rest)} bytes at {offset}", lambda: os.pwrite(self._handle, rest, offset))  # noqa: B023
            if not done or (done % BLOCK and done != len(rest)):
                # What went in is no whole block, so O_DIRECT cannot go on after it; a full disk does this.
                raise WriteFailed(
                    f"`{self.path}`: short write: {done} of {len(rest)} bytes at {offset}",
                    "see `df`, `quota` and `dmesg | tail`; the previous checkpoint is whole",
                )
            rest, offset = rest[done:], offset + done

    def write_from_gpu(self, address: int, count: int, offset: int) -> None:
        """``count`` bytes of the current GPU's memory, by cuFile; the file was opened with ``gds``."""
        assert self._registered is not None  # noqa: S101  (only such files have such blocks)
        self._registered.write(address, count, offset)

    def sync(self) -> None:
        """On the medium when this returns, the file's size and blocks too."""
        self._told("fsync", lambda: os.fsync(self._handle))

    def close(self) -> None:
        if self._registered is not None:
            self._registered.close()
            self._registered = None
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _told(self, doing: str, act: Callable[[], _T]) -> _T:
        try:
            return act()
        except OSError as error:
            raise WriteFailed.of(self.path, doing, error) from error
