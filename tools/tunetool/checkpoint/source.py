"""Data files of a checkpoint, read past the page cache (O_DIRECT) where their file system can."""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from tunetool.checkpoint.direct import pages
from tunetool.checkpoint.items import BLOCK
from tunetool.errors import CannotJudge
from tunetool.node.machine.block_stack import read_stack
from tunetool.regular_files import open_regular

_HINTS = {
    errno.ENOENT: "a file of the checkpoint is missing; load another one, or drain's copy of this one",
    errno.EIO: "look at `dmesg | tail` and the drives' health; load another checkpoint",
}


def failed(path: Path, tensor: str, doing: str, error: OSError) -> CannotJudge:
    """What went wrong with a tensor's file, in one line."""
    return CannotJudge(
        f"`{path}`: {doing} for `{tensor}` failed: {error.strerror or error}",
        _HINTS.get(error.errno or 0, "load another checkpoint"),
    )


def truncated(path: Path, tensor: str, size: int, stop: int) -> CannotJudge:
    """A file that ends before what it should hold."""
    return CannotJudge(
        f"`{path}` is {size} bytes long, and `{tensor}` ends at {stop}: it is cut short", "load another checkpoint"
    )


class Files:
    """The data files of ``directory``. Each is open from its first read until ``done`` was said as often as expected.

    Threads may share it. ``direct``: O_DIRECT is tried; on a file system in memory it would only copy once more.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.direct = not read_stack(str(directory)).in_memory
        self._handles: dict[str, int] = {}
        self._left: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def expect(self, names: Iterable[str]) -> None:
        """As many reads as names are to come; the limit of open files is small, so none stays open longer."""
        with self._lock:
            self._left.update(names)

    def done(self, name: str) -> None:
        with self._lock:
            self._left[name] -= 1
            handle = self._handles.pop(name, None) if self._left[name] <= 0 else None
        if handle is not None:
            os.close(handle)

    @contextlib.contextmanager
    def _one(self, name: str) -> Iterator[None]:
        self.expect([name])
        try:
            yield
        finally:
            self.done(name)

    def close(self) -> None:
        with self._lock:
            handles, self._handles = list(self._handles.values()), {}
            self._left.clear()
        for handle in handles:
            os.close(handle)

    def size(self, name: str, tensor: str) -> int:
        try:
            return (self.directory / name).stat().st_size
        except OSError as error:
            raise failed(self.directory / name, tensor, "finding it", error) from error

    def read(self, name: str, view: memoryview, offset: int, tensor: str) -> int:
        """Fill ``view`` from ``offset`` on; bytes that came, fewer only at the file's end.

        Offset, length and address must be aligned where ``direct``. ``tensor`` is what an error names beside the file.
        """
        try:
            return self._read(self._handle(name), view, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise failed(self.directory / name, tensor, f"reading {len(view)} bytes at {offset}", error) from error
        # It let itself be opened for O_DIRECT, and refuses to be read so.
        handle = self._handle(name)
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~os.O_DIRECT)
        try:
            return self._read(handle, view, offset)
        except OSError as error:
            raise failed(self.directory / name, tensor, f"reading {len(view)} bytes at {offset}", error) from error

    def content(self, name: str, offset: int, count: int, tensor: str) -> bytes:
        """Any bytes of a file. Raises ``CannotJudge`` when it ends before."""
        start, stop = offset - offset % BLOCK, offset + count + -(offset + count) % BLOCK
        if stop == start:
            return b""
        with pages(stop - start) as memory, memoryview(memory) as view, self._one(name):
            came = self.read(name, view, start, tensor)
            if start + came < offset + count:
                raise truncated(self.directory / name, tensor, self.size(name, tensor), offset + count)
            return bytes(view[offset - start : offset - start + count])

    def memory_alignment(self, name: str) -> int:
        """Bytes. What a direct read asks of the address it reads to: the kernel tells few of its drivers' rules."""
        if not self.direct:
            return 1
        with pages(3 * BLOCK) as memory, memoryview(memory) as view, self._one(name):
            for alignment in (64, 512):
                try:
                    self._read(self._handle(name), view[alignment : alignment + BLOCK], 0)
                except OSError:
                    continue
                return alignment
        return BLOCK

    def _read(self, handle: int, view: memoryview, offset: int) -> int:
        done = 0
        while done < len(view):
            count = os.preadv(handle, [view[done:]], offset + done)
            done += count
            # A direct read that stops within a block has met the file's end.
            if not count or (self.direct and count % BLOCK):
                break
        return done

    def _handle(self, name: str) -> int:
        with self._lock:
            handle = self._handles.get(name)
            if handle is None:
                handle = self._handles[name] = self._open(name)
            return handle

    def _open(self, name: str) -> int:
        path = self.directory / name
        if self.direct:
            try:
                return open_regular(path, os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
        return open_regular(path)
