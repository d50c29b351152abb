"""One file from here to shared storage: copied, synced, read back past the page cache, and only then given its name."""

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

CHUNK = 4 * 2**20
_SYNC_EVERY = 16 * 2**20
"""Where direct I/O is refused, dirty bytes that may pile up: what is not written when a save begins slows it."""
PART = ".part-"


class Gone(CannotJudge):
    """What is written to is not there any more."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"`{path}` was removed while it was written", "do two jobs drain the same step to one place?")


class Changed(CannotJudge):
    """What is read was written to since it was saved."""

    def __init__(self, path: Path, since: str = "the drain of its step was asked for", more: str = "") -> None:
        super().__init__(
            f"`{path}` changed since {since}",
            f"a step that drains must not be saved to; save it again, then drain it again{more}",
        )


@dataclass(frozen=True)
class Filed:
    """A file as it was written and read back."""

    size: int
    xxh3_64: str


def copy_file(
    source: Path, target: Path, wait: Callable[[int], None], rank: int = 0, expected: Identity | None = None
) -> Filed:
    """Copy ``source`` to ``target``, which appears whole or not at all. ``wait`` is asked before each piece.

    ``expected`` is what ``source`` must be, before and after; without it, what it is when it is opened.

    Raises ``Changed`` when ``source`` is not that, ``CannotJudge`` for what the storage refuses and for bytes that come
    back changed, ``Gone`` when the directory of ``target`` was removed meanwhile.
    """
    temporary = target.with_name(f"{PART}{rank}-{target.name}-{secrets.token_hex(4)}")
    try:
        with _told(source, "read"):
            stream = source.open("rb", buffering=0)
        with stream:
            expected = expected or Identity.of(os.fstat(stream.fileno()))
            _check(stream.fileno(), source, expected)
            with _told(target, "written"):
                out = _create(temporary)
            try:
                written = _copy(stream.fileno(), source, out, target, wait)
            finally:
                os.close(out)
            _check(stream.fileno(), source, expected)
        with _told(target, "read back"):
            back = digest_of(temporary, wait)
        if back != written:
            raise CannotJudge(
                f"`{target}` does not hold what was written to it: {written.size} bytes, xxh3_64 {written.xxh3_64}, "
                f"came back as {back.size}, {back.xxh3_64}",
                "this storage loses data: look at its logs before anything is drained to it again",
            )
        with _told(target, "written"):
            temporary.replace(target)
        return written
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _check(handle: int, source: Path, expected: Identity) -> None:
    """Raises ``Changed`` unless the open file and the one of that name are what was ``expected``."""
    with _told(source, "read"):
        identities = {Identity.of(os.fstat(handle)), Identity.of(source.stat())}
    if identities != {expected}:
        raise Changed(source)


def remove_parts(directory: Path, rank: int | None = None) -> None:
    """Delete what interrupted copies left, of one rank or of all."""
    for path in directory.rglob(f"{PART}*" if rank is None else f"{PART}{rank}-*"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _copy(source: int, name: Path, out: int, target: Path, wait: Callable[[int], None]) -> Filed:
    with _told(name, "read"):
        # Already read once: pages of the checkpoint must not push out what training reads.
        os.posix_fadvise(source, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    hashed, done, synced = xxhash.xxh3_64(), 0, 0
    buffer = _pages()
    while True:
        wait(CHUNK)
        with _told(name, "read"):
            count = os.readv(source, [buffer])
        if count == 0:
            break
        hashed.update(buffer[:count])
        with _told(target, "written"):
            _write_all(out, buffer[:count])
            done += count
            if done - synced >= _SYNC_EVERY:
                os.fdatasync(out)
                os.posix_fadvise(out, synced, done - synced, os.POSIX_FADV_DONTNEED)
                synced = done
        with contextlib.suppress(OSError):
            os.posix_fadvise(source, 0, done, os.POSIX_FADV_DONTNEED)
    with _told(target, "written"):
        os.fsync(out)
        os.posix_fadvise(out, 0, 0, os.POSIX_FADV_DONTNEED)
    return Filed(done, hashed.hexdigest())


def _pages() -> memoryview:
    """A buffer that begins at a page, as direct I/O asks."""
    return memoryview(mmap.mmap(-1, CHUNK))


def _create(path: Path) -> int:
    """A new file, past the page cache where the file system can: a save must not wait for our dirty pages."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_EXCL | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # The refused open may have made the file.
    return os.open(path, flags | os.O_TRUNC, 0o644)


def _write_all(out: int, piece: memoryview) -> None:
    while piece:
        if len(piece) % mmap.PAGESIZE:
            # The end of a file, which direct I/O cannot write.
            fcntl.fcntl(out, fcntl.F_SETFL, fcntl.fcntl(out, fcntl.F_GETFL) & ~os.O_DIRECT)
        piece = piece[os.write(out, piece) :]


def digest_of(path: Path, wait: Callable[[int], None] = lambda count: None) -> Filed:
    """Size and hash of what the medium holds: by direct I/O where the file system has it, else after its pages went.

    Raises ``OSError``.
    """
    handle = _open_past_the_cache(path)
    try:
        hashed, done, buffer = xxhash.xxh3_64(), 0, _pages()
        while True:
            wait(CHUNK)
            count = os.preadv(handle, [buffer], done)
            hashed.update(buffer[:count])
            done += count
            # At the end direct I/O could not read on from an odd offset.
            if count == 0 or count % mmap.PAGESIZE:
                return Filed(done, hashed.hexdigest())
    finally:
        os.close(handle)


def _open_past_the_cache(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    return handle


_FULL = {errno.ENOSPC: "it is full", errno.EDQUOT: "the quota is used up", errno.EFBIG: "a limit on the size of files"}


@contextlib.contextmanager
def _told(path: Path, action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if action != "read" and error.errno == errno.ENOENT:
            raise Gone(path) from None
        reason = _FULL.get(error.errno or 0, error.strerror)
        hint = "the checkpoint on the node is untouched; make room (`max_to_keep`), then drain it again"
        if action == "read":
            hint = "see `dmesg | tail`; was the step deleted or saved again before it was drained?"
        raise CannotJudge(f"`{path}` cannot be {action}: {reason}", hint) from error
