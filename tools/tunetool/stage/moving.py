"""Moving the bytes: many threads, each with one buffer in which a block is read, summed and written."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.errors import CannotJudge, TunetoolError
from tunetool.node.files import read_text
from tunetool.stage.checksums import Checksum, hasher, piece_bytes
from tunetool.stage.pieces import Piece, cut
from tunetool.stage.system import SECTOR, direct, in_page_cache
from tunetool.stage.tree import Entry

BLOCK_BYTES = 4 * 2**20
DIRECT_BYTES = 2**20
"""Below this a file is read through the page cache: one request, whose cost is not the copy."""
_PATIENCE = 30.0
"""Seconds that a thread gets to come back from the kernel when the work is to stop."""


@dataclass(frozen=True)
class Plan:
    """What to do with each file: ``destination`` None only reads and sums it."""

    destination: Path | None
    checksum: Checksum
    threads: int
    read_direct: bool = True
    """Past the page cache, where the source can and does not hold the bytes there."""
    ask_cache: bool = True
    """Whether bytes that the page cache holds are taken from there."""
    write_direct: bool = False


@dataclass
class Tally:
    """What one thread, or all of them, did. Seconds are summed over threads."""

    bytes: int = 0
    direct_bytes: int = 0
    reading: float = 0.0
    summing: float = 0.0
    writing: float = 0.0

    def add(self, other: Tally) -> None:
        """Sum up."""
        for name in ("bytes", "direct_bytes", "reading", "summing", "writing"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Moved:
    """``digests``: for each file, one per piece."""

    digests: list[list[str]]
    tally: Tally
    seconds: float
    cpu_seconds: float
    busy: float
    """What of all CPUs' time the whole machine was at work, whoever for."""


@dataclass
class _Work:
    files: Sequence[Entry]
    plan: Plan
    digests: list[list[str]]
    jobs: queue.SimpleQueue[list[Piece]]
    stop: threading.Event = field(default_factory=threading.Event)
    failed: list[BaseException] = field(default_factory=list)


def move(files: Sequence[Entry], plan: Plan, tick: Callable[[int], None]) -> Moved:
    """Copy (or only read) and sum every file. ``tick`` is told, often, how many bytes are done.

    Files are made with their mode and time; directories must be there. Raises ``CannotJudge`` naming the file when
    reading or writing fails, or when a file is not as it was listed once it is opened. Whether it changed after that,
    the caller finds by listing again.
    """
    jobs = cut([entry.size for entry in files], piece_bytes(plan.checksum))
    work = _Work(files, plan, [[""] * _pieces(entry.size, plan) for entry in files], queue.SimpleQueue())
    if plan.destination is not None:
        _make_big(files, plan, plan.destination)
    for job in jobs:
        work.jobs.put(job)
    tallies = [Tally() for _ in range(max(1, min(plan.threads, len(jobs))))]
    threads = [threading.Thread(target=_worker, args=(work, tally), daemon=True) for tally in tallies]
    started, cpu, jiffies = time.perf_counter(), time.process_time(), cpu_times()
    told = started
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            # Not join(): interrupted by Ctrl-C it takes a running thread for an ended one (Python before 3.13).
            time.sleep(0.005 if time.perf_counter() - started < 0.5 else 0.1)
            if time.perf_counter() - told >= 0.1:
                tick(sum(tally.bytes for tally in tallies))
                told = time.perf_counter()
    except BaseException:
        work.stop.set()
        deadline = time.monotonic() + _PATIENCE
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            time.sleep(0.01)
        raise
    if work.failed:
        raise work.failed[0]
    whole = Tally()
    for tally in tallies:
        whole.add(tally)
    if plan.destination is not None:
        _finish_big(files, plan, plan.destination)
    seconds, own = time.perf_counter() - started, time.process_time() - cpu
    at_work, all_of_it = (after - before for after, before in zip(cpu_times(), jiffies, strict=True))
    return Moved(work.digests, whole, seconds, own, at_work / max(all_of_it, 1))


def cpu_times() -> tuple[int, int]:
    """Ticks in which the machine's CPUs were at work, and all ticks (proc_stat(5)); idle and iowait are no work."""
    first = (read_text("/proc/stat") or "").partition("\n")[0].split()[1:9]
    ticks = [int(field) for field in first]
    return sum(ticks) - sum(ticks[3:5]), sum(ticks)


def _pieces(size: int, plan: Plan) -> int:
    step = piece_bytes(plan.checksum)
    return max(1, -(-size // step)) if step is not None else 1


def _make_big(files: Sequence[Entry], plan: Plan, destination: Path) -> None:
    """Files that several threads write exist, at their full length, before the first of them does."""
    for entry in files:
        if _pieces(entry.size, plan) > 1:
            with _writing(destination, entry):
                handle = _create(str(destination / entry.path))
                try:
                    os.ftruncate(handle, entry.size)
                finally:
                    os.close(handle)


def _finish_big(files: Sequence[Entry], plan: Plan, destination: Path) -> None:
    for entry in files:
        if _pieces(entry.size, plan) > 1:
            path = destination / entry.path
            path.chmod(entry.mode)
            os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))


def _worker(work: _Work, tally: Tally) -> None:
    try:
        # Anonymous memory starts on a page, as direct I/O wants it. It is not closed: an error's traceback holds views.
        buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        while not work.stop.is_set():
            try:
                job = work.jobs.get_nowait()
            except queue.Empty:
                return
            for piece in job:
                _move_piece(work, piece, buffer, tally)
    except _Stopped:
        return
    except BaseException as error:
        work.failed.append(error)
        work.stop.set()


class _Stopped(Exception):
    """Somebody else failed, or the user has had enough."""


def _move_piece(work: _Work, piece: Piece, buffer: memoryview, tally: Tally) -> None:
    entry, plan = work.files[piece.file], work.plan
    with _Source(entry, piece, plan) as source:
        if plan.destination is None:
            _pump(work, piece, buffer, tally, source, None)
        else:
            with _Sink(entry, piece, plan, plan.destination) as sink:
                _pump(work, piece, buffer, tally, source, sink)


def _pump(work: _Work, piece: Piece, buffer: memoryview, tally: Tally, source: _Source, sink: _Sink | None) -> None:
    digest = hasher(work.plan.checksum)
    done = 0
    while done < piece.length:
        if work.stop.is_set():
            raise _Stopped
        start = time.perf_counter()
        count = source.fill(buffer, piece.offset + done, min(len(buffer), piece.length - done))
        read = time.perf_counter()
        digest.update(buffer[:count])
        summed = time.perf_counter()
        if sink is not None:
            sink.put(buffer[:count], piece.offset + done)
        tally.reading += read - start
        tally.summing += summed - read
        tally.writing += time.perf_counter() - summed
        tally.bytes += count
        tally.direct_bytes += count if source.direct is not None else 0
        done += count
    work.digests[piece.file][piece.number] = digest.hexdigest()


class _Source:
    """The bytes of one piece; past the page cache where that helps."""

    def __init__(self, entry: Entry, piece: Piece, plan: Plan) -> None:
        self.entry = entry
        self.direct: int | None = None
        self._stack = contextlib.ExitStack()
        self._piece, self._plan = piece, plan

    def __enter__(self) -> _Source:
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
        if not self._plan.read_direct or self._piece.length < DIRECT_BYTES:
            return False
        return not (self._plan.ask_cache and in_page_cache(self._handle, self._piece.offset, self._piece.length))

    def fill(self, buffer: memoryview, offset: int, count: int) -> int:
        """``count`` bytes into ``buffer``, fewer only as the kernel gives fewer."""
        with _reading(self.entry):
            got = self._straight(buffer, offset, count) if self.direct is not None else 0
            if self.direct is None:
                got = os.preadv(self._handle, [buffer[:count]], offset)
        # A short answer leaves the next offset crooked: the rest goes the other way.
        self.direct = self.direct if got == count else None
        if got == 0:
            raise _changed(self.entry)
        return got

    def _straight(self, buffer: memoryview, offset: int, count: int) -> int:
        assert self.direct is not None  # noqa: S101
        try:
            return min(count, os.preadv(self.direct, [buffer[: -(-count // SECTOR) * SECTOR]], offset))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = None
            return 0

    def _check(self) -> None:
        """Raises ``CannotJudge`` when the file is not as it was listed."""
        found = os.fstat(self._handle)
        if self._plan.destination is not None and (found.st_size, found.st_mtime_ns) != (
            self.entry.size,
            self.entry.mtime_ns,
        ):
            raise _changed(self.entry)


def _changed(entry: Entry) -> CannotJudge:
    return CannotJudge(f"`{entry.origin}` changed while it was read", "stage a source at rest")


class _Sink:
    """Where one piece goes."""

    def __init__(self, entry: Entry, piece: Piece, plan: Plan, destination: Path) -> None:
        self._entry, self._piece, self._plan, self._place = entry, piece, plan, destination
        self._direct: int | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Sink:
        path = str(self._place / self._entry.path)
        with _writing(self._place, self._entry), contextlib.ExitStack() as stack:
            if self._piece.of == 1:
                self._handle = _create(path)
            else:
                self._handle = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, self._handle)
            if self._plan.write_direct and self._piece.length >= DIRECT_BYTES:
                self._direct = stack.enter_context(direct(path, os.O_WRONLY))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with _writing(self._place, self._entry), self._stack:
            if kind is None and self._piece.of == 1:
                os.fchmod(self._handle, self._entry.mode)
                os.utime(self._handle, ns=(self._entry.mtime_ns, self._entry.mtime_ns))

    def put(self, data: memoryview, offset: int) -> None:
        """All of it."""
        with _writing(self._place, self._entry):
            done = self._straight(data, offset) if self._direct is not None and offset % SECTOR == 0 else 0
            while done < len(data):
                done += os.pwrite(self._handle, data[done:], offset + done)

    def _straight(self, data: memoryview, offset: int) -> int:
        assert self._direct is not None  # noqa: S101
        try:
            return os.pwrite(self._direct, data[: len(data) // SECTOR * SECTOR], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = None
            return 0


def _create(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


@contextlib.contextmanager
def _reading(entry: Entry) -> Iterator[None]:
    try:
        yield
    except TunetoolError:
        raise
    except FileNotFoundError:
        raise CannotJudge(f"`{entry.origin}` vanished while it was staged", "stage a source at rest") from None
    except OSError as error:
        raise CannotJudge(f"`{entry.origin}` cannot be read: {error.strerror}", "see `dmesg | tail`") from None


@contextlib.contextmanager
def _writing(place: Path, entry: Entry) -> Iterator[None]:
    try:
        yield
    except TunetoolError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CannotJudge(
                f"`{place.parent}` is full ({error.strerror}) at `{entry.path}`; what was copied is removed",
                "free what others took there meanwhile, or stage elsewhere",
            ) from None
        raise CannotJudge(
            f"`{entry.path}` cannot be written in `{place.parent}`: {error.strerror}", "see `dmesg | tail`"
        ) from None
