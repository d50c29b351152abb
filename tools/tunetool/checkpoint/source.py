"""Reads data files with O_DIRECT, past the page cache, if their file system supports it; or what the cache holds from
there, and the rest with O_DIRECT."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tunetool.checkpoint.memory_file_system import is_in_memory
from tunetool.checkpoint.raw_bytes import BLOCK, pages
from tunetool.errors import CannotJudge
from tunetool.regular_files import below, open_regular

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

    def holds(self, start: int, stop: int) -> bool:
        """Whether the page cache holds [start, stop), as far as the file goes. False if nothing says."""
        stop = min(stop, self._size)
        if self._address is None or start % _PAGE or stop <= start:
            return False
        pages = -(-(stop - start) // _PAGE)
        resident = ctypes.create_string_buffer(pages)
        return not _libc.mincore(self._address + start, stop - start, resident) and resident.raw.count(1) == pages

    def read(self, view: memoryview, offset: int) -> int | None:
        """Fill ``view`` from ``offset`` on, up to the end of file; returns the number of bytes. None if the page cache
        lacks a part or nothing says. ``offset`` is a multiple of a page."""
        if not self.holds(offset, offset + len(view)):
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


_ANOTHER_CHECKPOINT = "load another checkpoint, or the drained copy of this one"


class Files:
    """The data files of ``directory``. A file is open from its first read until ``done`` was called as often as
    expected.

    Threads may share it. ``direct``: O_DIRECT is used; not on a tmpfs, where it would only cause another copy.
    ``prefer_cache``: what the page cache holds is copied from there; the rest is read with O_DIRECT, and the cache
    stays as it is. ``contained``: a file to which a link leads out of the directory is refused (``UsageProblem``).
    ``hint``: what to do where a file cannot be read. ``listed``: inodes that files had when their headers were read;
    another file of the name is refused (``CannotJudge``).
    """

    def __init__(
        self,
        directory: Path,
        *,
        prefer_cache: bool = False,
        contained: bool = False,
        hint: str = _ANOTHER_CHECKPOINT,
        listed: Mapping[str, int] | None = None,
    ) -> None:
        self.directory = directory
        self._contained = contained
        self.in_memory = is_in_memory(directory)
        self.direct = not self.in_memory
        self._prefer_cache = prefer_cache
        self._hint = hint
        self._handles: dict[str, int] = {}
        self._cached: dict[str, CachedFile] = {}
        self._inodes: dict[str, tuple[int, int]] = {}
        """Of each file that was opened, the file system's number and its own."""
        self._listed = listed or {}
        self._reads_left: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def expect(self, names: Iterable[str]) -> None:
        """Announce one read for each entry of ``names``. A file is closed after its last read, since the limit of open
        files is small."""
        with self._lock:
            self._reads_left.update(names)

    def done(self, name: str) -> None:
        with self._lock:
            self._reads_left[name] -= 1
            is_last = self._reads_left[name] <= 0
            handle = self._handles.pop(name, None) if is_last else None
            cached = self._cached.pop(name, None) if is_last else None
        if handle is not None:
            os.close(handle)
        if cached is not None:
            cached.close()

    @contextlib.contextmanager
    def _counted_read(self, name: str) -> Iterator[None]:
        self.expect([name])
        try:
            yield
        finally:
            self.done(name)

    def close(self) -> None:
        with self._lock:
            handles, self._handles = list(self._handles.values()), {}
            cached, self._cached = list(self._cached.values()), {}
            self._reads_left.clear()
        for handle in handles:
            os.close(handle)
        for file in cached:
            file.close()

    def leave_open(self) -> None:
        """Leave the open files to threads that still read them: another file could get the number of a closed one."""
        with self._lock:
            self._handles, self._cached = {}, {}

    def size(self, name: str, tensor: str) -> int:
        try:
            return (self.directory / name).stat().st_size
        except OSError as error:
            raise self._failed(name, tensor, "finding it", error) from error

    def _failed(self, name: str, tensor: str, doing: str, error: OSError) -> CannotJudge:
        hints = {
            errno.EIO: f"check `dmesg | tail` and the health of the drives, or {self._hint}",
            errno.EMFILE: "allow this process more open files: `ulimit -n`",
        }
        return CannotJudge(
            f"`{self.directory / name}`: {doing} for `{tensor}` failed: {error.strerror or error}",
            hints.get(error.errno or 0, self._hint),
        )

    def truncated(self, name: str, tensor: str, size: int, stop: int) -> CannotJudge:
        """The error for a file that is too short: ``size`` bytes, but the tensor ends at ``stop``."""
        return CannotJudge(
            f"`{self.directory / name}` is {size} bytes long, and `{tensor}` ends at {stop}: it is cut short",
            self._hint,
        )

    def read(self, name: str, view: memoryview, offset: int, tensor: str) -> int:
        """Read into ``view`` from ``offset`` on; returns the number of bytes, fewer than asked only at the end of file.

        Offset, length and address must be aligned if ``direct``. ``tensor`` is used in error messages only.
        Raises ``CannotJudge``.
        """
        doing = f"reading {len(view)} bytes at {offset}"
        try:
            if self._prefer_cache and self.direct:
                count = self._cached_file(name).read(view, offset)
                if count is not None:
                    return count
            return self._read(self._handle(name), view, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise self._failed(name, tensor, doing, error) from error
        # The file can be opened with O_DIRECT, but not read: continue without O_DIRECT.
        handle = self._handle(name)
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~os.O_DIRECT)
        try:
            return self._read(handle, view, offset)
        except OSError as error:
            raise self._failed(name, tensor, doing, error) from error

    def in_memory_handle(self, name: str, start: int, stop: int) -> int | None:
        """A descriptor to read [start, stop) of a file from memory with; None if the range is not there, or its file
        cannot be opened. Valid until ``done``. ``start`` is a multiple of a page."""
        try:
            if self.in_memory:
                return self._handle(name)
            if self._prefer_cache and self.direct:
                cached = self._cached_file(name)
                return cached.handle if cached.holds(start, stop) else None
        except OSError:
            pass  # reading it says what is wrong
        return None

    def from_memory(self, name: str, ranges: Sequence[tuple[int, int]], tensor: str) -> list[bytes]:
        """The ranges [start, stop) of a file of a memory file system; shorter where the file ends before."""
        try:
            with self._counted_read(name):
                handle = self._handle(name)
                return [os.pread(handle, stop - start, start) for start, stop in ranges]
        except OSError as error:
            raise self._failed(name, tensor, f"reading {len(ranges)} headers", error) from error

    def content(self, name: str, offset: int, count: int, tensor: str) -> bytes:
        """``count`` bytes of a file from ``offset`` on, unaligned. Raises ``CannotJudge`` if the file is shorter."""
        start, stop = offset - offset % BLOCK, offset + count + -(offset + count) % BLOCK
        if stop == start:
            return b""
        with pages(stop - start) as memory, memoryview(memory) as view, self._counted_read(name):
            came = self.read(name, view, start, tensor)
            if start + came < offset + count:
                raise self.truncated(name, tensor, self.size(name, tensor), offset + count)
            return bytes(view[offset - start : offset - start + count])

    def memory_alignment(self, name: str) -> int:
        """Alignment in bytes that a direct read needs of its target address. It is tried out, since the kernel reports
        little about it."""
        if not self.direct:
            return 1
        with pages(3 * BLOCK) as memory, memoryview(memory) as view, self._counted_read(name):
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
            # A direct read that stops within a block has reached the end of the file.
            if not count or (self.direct and count % BLOCK):
                break
        return done

    def _cached_file(self, name: str) -> CachedFile:
        with self._lock:
            if name not in self._cached:
                cached = CachedFile(self.directory / name)
                self._need_same(name, cached.handle, cached.close)
                self._cached[name] = cached
            return self._cached[name]

    def _handle(self, name: str) -> int:
        with self._lock:
            handle = self._handles.get(name)
            if handle is None:
                handle = self._open(name)
                self._need_same(name, handle, functools.partial(os.close, handle))
                self._handles[name] = handle
            return handle

    def _need_same(self, name: str, handle: int, close: Callable[[], None]) -> None:
        """Raises ``CannotJudge`` where another file has the name that was opened before: tensors would be of both."""
        status = os.fstat(handle)
        inode = status.st_dev, status.st_ino
        if self._inodes.setdefault(name, inode) != inode or self._listed.get(name, inode[1]) != inode[1]:
            close()
            raise CannotJudge(f"`{self.directory / name}` was replaced by another file meanwhile", self._hint)

    def _open(self, name: str) -> int:
        path, flags = self.directory / name, 0
        if self._contained:
            path, flags = below(self.directory, name).resolve(), os.O_NOFOLLOW
        if self.direct:
            try:
                return open_regular(path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
        return open_regular(path, flags)
