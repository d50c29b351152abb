"""Copies one file to shared storage: writes and syncs a temporary file, reads it back with O_DIRECT, then renames
it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from tunetool.checkpoint.identity import Identity
from tunetool.errors import CannotJudge
from tunetool.regular_files import open_regular

CHUNK = 4 * 2**20
_SYNC_EVERY = 16 * 2**20
"""Without direct I/O, the largest number of dirty bytes in the page cache, since they would slow down a save."""
PART = ".part-"


class Gone(CannotJudge):
    """The target directory was removed during the copy."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"`{path}` was removed while it was written", "do two jobs drain the same step to the same directory?"
        )


class Changed(CannotJudge):
    """The source file was written to since it was saved."""

    def __init__(self, path: Path, since: str = "the drain of its step was asked for", more: str = "") -> None:
        super().__init__(
            f"`{path}` changed since {since}",
            f"do not save to a step while it is drained; save it again, then drain it again{more}",
        )


@dataclass(frozen=True)
class CopiedFile:
    """A file that was copied: size in bytes and checksum, as written and read back."""

    size: int
    xxh3_64: str


def copy_file(
    source: Path, target: Path, wait: Callable[[int], None], rank: int = 0, expected: Identity | None = None
) -> CopiedFile:
    """Copy ``source`` to ``target``, which appears complete or not at all. ``wait(bytes)`` is called before each chunk.

    ``expected``: the identity of ``source`` before and after the copy; default: its identity when it is opened.

    Raises ``Changed`` if ``source`` differs from that, ``CannotJudge`` for storage errors and for data that reads back
    differently, ``Gone`` if the directory of ``target`` was removed during the copy.
    """
    temporary = target.with_name(f"{PART}{rank}-{target.name}-{secrets.token_hex(4)}")
    try:
        with _naming_errors(source, "read"):
            stream = source.open("rb", buffering=0)
        with stream:
            expected = expected or Identity.of(os.fstat(stream.fileno()))
            _check(stream.fileno(), source, expected)
            with _naming_errors(target, "written"):
                out = create(temporary)
            try:
                written = _copy(stream.fileno(), source, out, target, wait)
            finally:
                os.close(out)
            _check(stream.fileno(), source, expected)
        with _naming_errors(target, "read back"):
            back = digest_of(temporary, wait)
        if back != written:
            raise CannotJudge(
                f"`{target}` does not hold what was written to it: {written.size} bytes, xxh3_64 {written.xxh3_64}, "
                f"came back as {back.size}, {back.xxh3_64}",
                "this storage corrupts data: check its logs before you drain to it again",
            )
        with _naming_errors(target, "written"):
            temporary.replace(target)
        return written
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _check(handle: int, source: Path, expected: Identity) -> None:
    """Raises ``Changed`` unless the open file and the file at its path both have the ``expected`` identity."""
    with _naming_errors(source, "read"):
        identities = {Identity.of(os.fstat(handle)), Identity.of(source.stat())}
    if identities != {expected}:
        raise Changed(source)


def remove_parts(directory: Path, rank: int | None = None) -> None:
    """Delete the temporary files of interrupted copies, of one rank or of all."""
    for path in directory.rglob(f"{PART}*" if rank is None else f"{PART}{rank}-*"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _copy(source: int, name: Path, out: int, target: Path, wait: Callable[[int], None]) -> CopiedFile:
    with _naming_errors(name, "read"):
        # Pages of the checkpoint must not displace training data in the page cache.
        os.posix_fadvise(source, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    hashed, done, synced = xxhash.xxh3_64(), 0, 0
    buffer = _pages()
    while True:
        wait(CHUNK)
        with _naming_errors(name, "read"):
            count = os.readv(source, [buffer])
        if count == 0:
            break
        hashed.update(buffer[:count])
        with _naming_errors(target, "written"):
            write_all(out, buffer[:count])
            done += count
            if done - synced >= _SYNC_EVERY:
                os.fdatasync(out)
                os.posix_fadvise(out, synced, done - synced, os.POSIX_FADV_DONTNEED)
                synced = done
        with contextlib.suppress(OSError):
            os.posix_fadvise(source, 0, done, os.POSIX_FADV_DONTNEED)
    with _naming_errors(target, "written"):
        os.fsync(out)
        os.posix_fadvise(out, 0, 0, os.POSIX_FADV_DONTNEED)
    return CopiedFile(done, hashed.hexdigest())


def _pages() -> memoryview:
    """A page-aligned buffer of ``CHUNK`` bytes for direct I/O."""
    return memoryview(mmap.mmap(-1, CHUNK))


def create(path: Path) -> int:
    """Create a file, with O_DIRECT if the file system supports it, so that a save need not wait for dirty pages."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_EXCL | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # The refused open may have created the file.
    return os.open(path, flags | os.O_TRUNC | os.O_NOFOLLOW, 0o644)


def write_all(out: int, piece: memoryview) -> None:
    """Write all of it to a file of ``create``; only the last piece of a file may end within a page. Raises
    ``OSError``."""
    while piece:
        if len(piece) % mmap.PAGESIZE:
            # Direct I/O cannot write the partial block at the end of a file.
            fcntl.fcntl(out, fcntl.F_SETFL, fcntl.fcntl(out, fcntl.F_GETFL) & ~os.O_DIRECT)
        piece = piece[os.write(out, piece) :]


def digest_of(
    path: Path,
    wait: Callable[[int], None] = lambda count: None,
    take: Callable[[memoryview], object] = lambda piece: None,
) -> CopiedFile:
    """Size and checksum of a file as stored on the medium: read with O_DIRECT, or after its cached pages were dropped.
    ``take`` gets the bytes, in order.

    Raises ``OSError``.
    """
    hashed, done = xxhash.xxh3_64(), 0
    for piece in pieces_of(path, wait):
        take(piece)
        hashed.update(piece)
        done += len(piece)
    return CopiedFile(done, hashed.hexdigest())


def pieces_of(path: Path, wait: Callable[[int], None] = lambda count: None) -> Iterator[memoryview]:
    """The bytes of a file, read likewise, in pieces that are valid until the next one."""
    handle = _open_past_the_cache(path)
    try:
        done, buffer = 0, _pages()
        while True:
            wait(CHUNK)
            count = os.preadv(handle, [buffer], done)
            yield buffer[:count]
            done += count
            # Direct I/O cannot continue from an unaligned offset, which only the end of the file has.
            if count == 0 or count % mmap.PAGESIZE:
                return
    finally:
        os.close(handle)


def _open_past_the_cache(path: Path) -> int:
    try:
        return open_regular(path, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    handle = open_regular(path)
    with contextlib.suppress(OSError):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    return handle


_FULL = {
    errno.ENOSPC: "it is full",
    errno.EDQUOT: "the quota is exceeded",
    errno.EFBIG: "it exceeds the file size limit",
}


@contextlib.contextmanager
def _naming_errors(path: Path, action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if action != "read" and error.errno == errno.ENOENT:
            raise Gone(path) from None
        reason = _FULL.get(error.errno or 0, error.strerror)
        hint = "the checkpoint on the node is unchanged; free some space (`max_to_keep`), then drain it again"
        if action == "read":
            hint = "check `dmesg | tail`; was the step deleted or saved again before it was drained?"
        raise CannotJudge(f"`{path}` cannot be {action}: {reason}", hint) from error
