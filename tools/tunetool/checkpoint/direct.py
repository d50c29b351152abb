"""Files written with O_DIRECT, past the page cache, where the file system supports it, from plain Python threads.

``os.pwrite`` releases the interpreter's lock while it waits, so a few threads with large blocks saturate a fast array
without any library. Lengths and offsets are multiples of 4096 bytes; the last block of a file is padded with zeros.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tunetool.checkpoint.memory_file_system import is_in_memory
from tunetool.checkpoint.os_errors import WriteFailed
from tunetool.checkpoint.raw_bytes import BLOCK, pages

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tunetool.checkpoint.gds import Registered

_T = TypeVar("_T")
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True)
class Created:
    """A file that this process created with O_EXCL (so it did not exist before): its path, device and inode."""

    path: Path
    device: int
    inode: int

    @classmethod
    def at(cls, path: Path, handle: int) -> Created:
        """Record the file at ``path``, which is open as ``handle``."""
        status = os.fstat(handle)
        return cls(path, status.st_dev, status.st_ino)

    def remove(self) -> None:
        """Unlink the file, unless another file has its path by now. Ignores storage errors."""
        with contextlib.suppress(OSError):
            status = self.path.lstat()
            if (status.st_dev, status.st_ino) == (self.device, self.inode):
                self.path.unlink()


_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def _fallocate(handle: int, size: int) -> bool:
    """Preallocate; False where the file system cannot, where ``os.posix_fallocate`` would write every block instead."""
    while _libc.fallocate(handle, 0, 0, size):
        number = ctypes.get_errno()
        if number in _UNSUPPORTED:
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return True


def _open_unnamed(directory: Path) -> int:
    """Open a file that has no name, or (on NFS) loses its name at once, so that a crash leaves nothing behind."""
    try:
        return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (*_UNSUPPORTED, errno.EISDIR):
            raise
    handle, name = tempfile.mkstemp(dir=directory, prefix=".tunetool-probe.")
    Path(name).unlink()
    return handle


class Target:
    """What the file system of a directory supports, probed once per device with a temporary file.

    ``direct``: O_DIRECT works. ``memory_alignment``: alignment in bytes that a write needs of its memory; many drives
    accept any multiple of 4, a file system in memory accepts anything. ``preallocates``: space is allocated before the
    first byte is written, except in memory, where that would zero every page first.
    """

    _known: dict[int, tuple[bool, int]] = {}  # noqa: RUF012  by device number, for the whole process

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        in_memory = is_in_memory(directory)
        self.preallocates = not in_memory
        # Newer kernels accept O_DIRECT on a tmpfs too, where it has no effect.
        self.direct, self.memory_alignment = (False, 1) if in_memory else self._probe_once(directory)

    @classmethod
    def _probe_once(cls, directory: Path) -> tuple[bool, int]:
        device = directory.stat().st_dev
        if device not in cls._known:
            try:
                handle = _open_unnamed(directory)
                try:
                    cls._known[device] = cls._probe(handle)
                finally:
                    os.close(handle)
            except OSError as error:
                raise WriteFailed.of(directory, "trying a direct write there", error) from error
        return cls._known[device]

    @staticmethod
    def _probe(handle: int) -> tuple[bool, int]:
        """Whether O_DIRECT works, and with which alignment. torch allocates at multiples of 64: only a write shows
        whether that is enough."""
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
    """A new file of ``size`` bytes, a multiple of 4096. Raises ``WriteFailed`` and removes the file if it cannot be
    made."""

    def __init__(self, path: Path, size: int, target: Target, gds: bool = False) -> None:
        self.path, self.size = path, size
        self._registered: Registered | None = None
        direct = os.O_DIRECT if target.direct else 0
        self._handle = self._naming_errors(
            "creating it",
            lambda: os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | direct, 0o666),
        )
        self.created = Created.at(path, self._handle)
        try:
            preallocated = target.preallocates and self._naming_errors(
                f"preallocating {size} bytes", lambda: _fallocate(self._handle, size)
            )
            if not preallocated:
                self._naming_errors("setting its size", lambda: os.ftruncate(self._handle, size))
            if gds:
                from tunetool.checkpoint.gds import Registered  # noqa: PLC0415  GPU nodes alone have cuFile

                self._registered = Registered(self._handle, path)
        except BaseException:
            self.close()
            self.created.remove()
            raise

    def write(self, view: Buffer, offset: int) -> None:
        """Write all of ``view`` at ``offset``; length and offset are multiples of 4096. Raises ``WriteFailed``."""
        rest = memoryview(view)
        while rest:
            # `_naming_errors` calls the function at once, before the loop's variables change.
            doing = f"writing {len(rest)} bytes at {offset}"
            done = self._naming_errors(doing, lambda: os.pwrite(self._handle, rest, offset))  # noqa: B023
            if not done or (done % BLOCK and done != len(rest)):
                # O_DIRECT cannot continue from the middle of a block; a full disk causes this.
                raise WriteFailed(
                    f"`{self.path}`: short write: {done} of {len(rest)} bytes at {offset}",
                    "see `df`, `quota` and `dmesg | tail`; the previous checkpoint is whole",
                )
            rest, offset = rest[done:], offset + done

    def write_from_gpu(self, address: int, count: int, offset: int) -> None:
        """Write ``count`` bytes of the current GPU's memory by cuFile. The file must have been opened with ``gds``."""
        assert self._registered is not None  # noqa: S101  (only such files have such blocks)
        self._registered.write(address, count, offset)

    def sync(self) -> None:
        """Flush data and metadata of the file to the medium (fsync). Raises ``WriteFailed``."""
        self._naming_errors("fsync", lambda: os.fsync(self._handle))

    def close(self) -> None:
        if self._registered is not None:
            self._registered.close()
            self._registered = None
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _naming_errors(self, doing: str, act: Callable[[], _T]) -> _T:
        try:
            return act()
        except OSError as error:
            raise WriteFailed.of(self.path, doing, error) from error
