"""The source and the sink of a piece: where its bytes are read and where they are written.

A small file is copied in as few steps of the interpreter as possible: those are what a tree of such files costs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tunetool.errors import CannotJudge, TunetoolError
from tunetool.measure.residency import in_page_cache
from tunetool.stage.pieces import Checksum, Piece, digest_of
from tunetool.stage.system import SECTOR, direct
from tunetool.stage.tree import Entry

DIRECT_BYTES = 2**20
"""Pieces smaller than this (bytes) are read through the page cache, where one more copy costs little."""

HOLE_BYTES = 2**16
"""Bytes of the smallest hole that stays one; it begins at a multiple of them."""
_ZEROS = bytes(HOLE_BYTES)

HUGE_PAGE = 2 * 2**20
"""Bytes of a tmpfs's huge page; on machines with larger ones a size that is set too often costs nothing."""


class Source:
    """Reads one piece; with direct I/O if that helps."""

    def __init__(self, entry: Entry, piece: Piece, *, past_cache: bool, ask_cache: bool, as_listed: bool) -> None:
        """``past_cache``: use direct I/O; ``ask_cache``: not for bytes that are in the page cache; ``as_listed``: the
        file must be unchanged since it was listed."""
        self.entry = entry
        self.direct: int | None = None
        self._stack = contextlib.ExitStack()
        self._piece, self._past_cache, self._ask_cache, self._as_listed = piece, past_cache, ask_cache, as_listed

    def __enter__(self) -> Source:
        with _reading(self.entry), contextlib.ExitStack() as stack:
            self._handle = os.open(self.entry.origin, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            stack.callback(os.close, self._handle)
            self._check()
            if self._wants_direct():
                self.direct = stack.enter_context(direct(self.entry.origin, os.O_RDONLY))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _wants_direct(self) -> bool:
        if not self._past_cache or self._piece.length < DIRECT_BYTES:
            return False
        return not (self._ask_cache and in_page_cache(self._handle, self._piece.offset, self._piece.length))

    def fill(self, buffer: memoryview, offset: int, count: int) -> int:
        """Read up to ``count`` bytes at ``offset`` into ``buffer``; returns the number of bytes. Raises
        ``CannotJudge``."""
        with _reading(self.entry):
            got = self._direct_io(buffer, offset, count) if self.direct is not None else 0
            if self.direct is None:
                got = os.preadv(self._handle, [buffer[:count]], offset)
        # After a short read the next offset is unaligned: read the rest through the page cache.
        self.direct = self.direct if got == count else None
        if got == 0:
            raise _other_size(self._handle, self.entry, offset)
        return got

    def check_end(self) -> None:
        """Raises ``CannotJudge`` if the file goes on after the size that it says."""
        with _reading(self.entry):
            if self._piece.number == self._piece.of - 1 and os.pread(self._handle, 1, self.entry.size):
                raise _other_size(self._handle, self.entry, self.entry.size + 1)

    def _direct_io(self, buffer: memoryview, offset: int, count: int) -> int:
        assert self.direct is not None  # noqa: S101  (its one caller asks)
        try:
            return min(count, os.preadv(self.direct, [buffer[: -(-count // SECTOR) * SECTOR]], offset))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = None
            return 0

    def _check(self) -> None:
        if self._as_listed:
            _refuse_changed(self._handle, self.entry)


def _other_size(handle: int, entry: Entry, done: int) -> CannotJudge:
    """Of a file that ends after ``done`` bytes, or goes on after them, and not where its size says."""
    if os.fstat(handle).st_size != entry.size:
        return _changed(entry)
    what = f"ends after {done}" if done < entry.size else "holds more"
    return CannotJudge(
        f"`{entry.origin}` says that it has {entry.size} bytes, and {what}: the kernel makes it while it is read",
        "take it out of the source, or the link to it: files of /proc and /sys cannot be staged",
    )


def _refuse_changed(handle: int, entry: Entry) -> None:
    """Raises ``CannotJudge`` if the file has changed since it was listed."""
    status = os.fstat(handle)
    now = status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns
    if now != (entry.size, entry.mtime_ns, entry.inode, entry.ctime_ns):
        raise _changed(entry)


def read_small(entry: Entry, buffer: memoryview, as_listed: bool) -> memoryview:
    """The bytes of a file that fits into ``buffer``, as ``Source`` reads them. Raises ``CannotJudge``.

    A tree of 100,000 small files takes as long as the interpreter's steps for each: here are as few as possible.
    """
    try:
        handle = os.open(entry.origin, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if as_listed:
                _refuse_changed(handle, entry)
            # One byte more than it says: files of /proc say that they are empty.
            data, done, got = buffer[: entry.size + 1], 0, 1
            while got and (done < entry.size or not entry.size):
                got = os.preadv(handle, [data[done:]], done)
                done += got
            if done != entry.size:
                raise _other_size(handle, entry, done)
            return data[:done]
        finally:
            os.close(handle)
    except OSError as error:
        raise _unreadable(entry, error) from None


def write_small(entry: Entry, tree: Path, path: str, data: memoryview) -> int:
    """A new file at ``path`` (in ``tree``), complete with mode and time, as ``Sink`` writes it. Returns the bytes that
    are left out. Raises ``CannotJudge``."""
    try:
        handle = create(path, len(data), sized=entry.holes > 0)
        try:
            left = len(data)
            for start, end in _written(data) if entry.holes else ((0, len(data)),):
                left -= end - start
                done = start
                while done < end:
                    done += os.pwrite(handle, data[done:end], done)
            os.fchmod(handle, entry.mode)
            os.utime(handle, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(handle)
        return left
    except OSError as error:
        raise _unwritable(tree, entry, error) from None


def _changed(entry: Entry) -> CannotJudge:
    return CannotJudge(f"`{entry.origin}` changed while it was read", "stage a source at rest")


class Sink:
    """Writes one piece."""

    def __init__(self, entry: Entry, piece: Piece, destination: Path, *, past_cache: bool) -> None:
        self._entry, self._piece, self._destination, self._past_cache = entry, piece, destination, past_cache
        self._direct: int | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Sink:
        path = str(self._destination / self._entry.path)
        with writing(self._destination, self._entry), contextlib.ExitStack() as stack:
            if self._piece.of == 1:
                self._handle = create(path, self._entry.size, sized=self._entry.holes > 0)
            else:
                self._handle = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, self._handle)
            if self._past_cache and self._piece.length >= DIRECT_BYTES:
                self._direct = stack.enter_context(direct(path, os.O_WRONLY))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with writing(self._destination, self._entry), self._stack:
            if kind is None and self._piece.of == 1:
                os.fchmod(self._handle, self._entry.mode)
                os.utime(self._handle, ns=(self._entry.mtime_ns, self._entry.mtime_ns))

    def put(self, data: memoryview, offset: int) -> int:
        """Write ``data`` at ``offset``, but for zeros where the source has holes. Returns the bytes that are left out.
        Raises ``CannotJudge``."""
        if not self._entry.holes:
            self._put(data, offset)
            return 0
        left = len(data)
        for start, end in _written(data):
            self._put(data[start:end], offset + start)
            left -= end - start
        return left

    def _put(self, data: memoryview, offset: int) -> None:
        with writing(self._destination, self._entry):
            done = self._direct_io(data, offset) if self._direct is not None and offset % SECTOR == 0 else 0
            while done < len(data):
                done += os.pwrite(self._handle, data[done:], offset + done)

    def _direct_io(self, data: memoryview, offset: int) -> int:
        assert self._direct is not None  # noqa: S101  (its one caller asks)
        try:
            return os.pwrite(self._direct, data[: len(data) // SECTOR * SECTOR], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = None
            return 0


def _written(data: memoryview) -> Iterator[tuple[int, int]]:
    """The parts of ``data`` that are not zeros, by whole ``HOLE_BYTES``.

    What was read decides, not what the file system says of its holes: some have said it wrongly of fresh files.
    """
    start = None
    for at in range(0, len(data), HOLE_BYTES):
        part = data[at : at + HOLE_BYTES]
        if part[0] or part[-1] or part.tobytes() != _ZEROS[: len(part)]:
            start = at if start is None else start
        elif start is not None:
            yield start, at
            start = None
    if start is not None:
        yield start, len(data)


def create(path: str, size: int, sized: bool = False) -> int:
    """Create a file of ``size`` bytes for writing, with mode 0600 until it is complete.

    A large one, or where ``sized``, has its size before its first byte: a tmpfs with ``huge=within_size`` gives huge
    pages to nothing beyond it.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if size >= HUGE_PAGE or sized:
        try:
            os.ftruncate(handle, size)
        except BaseException:
            os.close(handle)
            raise
    return handle


@contextlib.contextmanager
def _reading(entry: Entry) -> Iterator[None]:
    try:
        yield
    except TunetoolError:
        raise
    except OSError as error:
        raise _unreadable(entry, error) from None


def _unreadable(entry: Entry, error: OSError) -> CannotJudge:
    if isinstance(error, FileNotFoundError):
        return CannotJudge(f"`{entry.origin}` vanished while it was staged", "stage a source at rest")
    if isinstance(error, PermissionError):
        return CannotJudge(f"`{entry.origin}` may not be read", "run as a user who may read it")
    return CannotJudge(f"`{entry.origin}` cannot be read: {error.strerror}", "see `dmesg | tail`")


@contextlib.contextmanager
def writing(tree: Path, entry: Entry) -> Iterator[None]:
    """Turn errors of writing ``entry`` in ``tree`` into ``CannotJudge``."""
    try:
        yield
    except TunetoolError:
        raise
    except OSError as error:
        raise _unwritable(tree, entry, error) from None


def _unwritable(tree: Path, entry: Entry, error: OSError) -> CannotJudge:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CannotJudge(
            f"`{tree.parent}` is full ({error.strerror}) at `{entry.path}`; what was copied is removed",
            "free some space, or stage elsewhere",
        )
    return CannotJudge(f"`{entry.path}` cannot be written in `{tree.parent}`: {error.strerror}", "see `dmesg | tail`")


@dataclass
class Tally:
    """The work of one thread, or of all threads. Seconds are summed over threads."""

    bytes: int = 0
    direct_bytes: int = 0
    hole_bytes: int = 0
    """Zeros in the holes of the source, which were not written."""
    reading: float = 0.0
    summing: float = 0.0
    writing: float = 0.0
    helper_cpu: float = 0.0
    """CPU seconds of other processes that worked for it."""

    def add(self, other: Tally) -> None:
        """Add the figures of ``other`` to this one."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def move_small(entry: Entry, tree: Path | None, root: str, checksum: Checksum, buffer: memoryview, tally: Tally) -> str:
    """Read a file that fits into ``buffer``, and write it below ``tree``, if there is one. Returns its checksum.

    ``root``: ``tree`` as text, since a path object takes longer to make than a small file takes to write. Raises
    ``CannotJudge``.
    """
    start = time.perf_counter()
    data = read_small(entry, buffer, as_listed=tree is not None)
    read = time.perf_counter()
    digest = digest_of(checksum, data)
    summed = time.perf_counter()
    if tree is not None:
        tally.hole_bytes += write_small(entry, tree, f"{root}/{entry.path}", data)
    tally.reading += read - start
    tally.summing += summed - read
    tally.writing += time.perf_counter() - summed
    tally.bytes += entry.size
    return digest
