"""Copies the data: many threads, each with one buffer that it reads a block into, hashes and writes."""

from __future__ import annotations

import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.node.common.files import read_text
from tunetool.stage.checksums import Checksum, digest_of, hasher, piece_bytes
from tunetool.stage.ends import DIRECT_BYTES, Sink, Source, create, read_small, write_small, writing
from tunetool.stage.pieces import Piece, cut
from tunetool.stage.tree import Entry

BLOCK_BYTES = 4 * 2**20
_STOP_SECONDS = 30.0
"""Seconds to wait for threads that are in a system call when the work is stopped."""


@dataclass(frozen=True)
class Plan:
    """What to do with each file. Without ``destination``, files are only read and hashed."""

    destination: Path | None
    checksum: Checksum
    threads: int
    read_direct: bool = True
    """Read with direct I/O if the source supports it and the data is not in the page cache."""
    ask_cache: bool = True
    """Whether data in the page cache is read from there."""
    write_direct: bool = False


@dataclass
class Tally:
    """The work of one thread, or of all threads. Seconds are summed over threads."""

    bytes: int = 0
    direct_bytes: int = 0
    reading: float = 0.0
    summing: float = 0.0
    writing: float = 0.0

    def add(self, other: Tally) -> None:
        """Add the figures of ``other`` to this one."""
        for name in ("bytes", "direct_bytes", "reading", "summing", "writing"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Moved:
    """The result of ``move``. ``digests``: for each file, one digest per piece."""

    digests: list[list[str]]
    tally: Tally
    seconds: float
    cpu_seconds: float
    busy: float
    """Fraction of all CPU time in which the machine was busy, with this or other work."""


@dataclass
class _Work:
    files: Sequence[Entry]
    plan: Plan
    digests: list[list[str]]
    jobs: queue.SimpleQueue[list[Piece]]
    root: str
    """The destination as text: a path object takes longer to make than a small file takes to write."""
    stop: threading.Event = field(default_factory=threading.Event)
    failed: list[BaseException] = field(default_factory=list)


def move(files: Sequence[Entry], plan: Plan, tick: Callable[[int], None]) -> Moved:
    """Copy (or only read) and hash every file. ``tick`` is called repeatedly with the number of bytes done.

    Files get their mode and time; directories must exist. Raises ``CannotJudge`` naming the file if reading or writing
    fails, or if a file has changed between listing and opening. To detect later changes, the caller must list again.
    """
    step = piece_bytes(plan.checksum)
    jobs = cut([entry.size for entry in files], step)
    big = [entry for entry in files if step is not None and entry.size > step]
    digests = [[""] * (1 if step is None else max(1, -(-entry.size // step))) for entry in files]
    work = _Work(files, plan, digests, queue.SimpleQueue(), str(plan.destination))
    if plan.destination is not None:
        _make_big(big, plan.destination)
    for job in jobs:
        work.jobs.put(job)
    tallies = [Tally() for _ in range(max(1, min(plan.threads, len(jobs))))]
    threads = [threading.Thread(target=_worker, args=(work, tally), daemon=True) for tally in tallies]
    started, cpu, jiffies = time.perf_counter(), time.process_time(), cpu_times()
    last_tick = started
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            # Not join(): interrupted by Ctrl-C it takes a running thread for an ended one (Python before 3.13).
            time.sleep(0.005 if time.perf_counter() - started < 0.5 else 0.1)
            if time.perf_counter() - last_tick >= 0.1:
                tick(sum(tally.bytes for tally in tallies))
                last_tick = time.perf_counter()
    except BaseException:
        work.stop.set()
        deadline = time.monotonic() + _STOP_SECONDS
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            time.sleep(0.01)
        raise
    if work.failed:
        raise work.failed[0]
    whole = Tally()
    for tally in tallies:
        whole.add(tally)
    if plan.destination is not None:
        _finish_big(big, plan.destination)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    busy_ticks, all_ticks = (after - before for after, before in zip(cpu_times(), jiffies, strict=True))
    return Moved(work.digests, whole, seconds, cpu_seconds, busy_ticks / max(all_ticks, 1))


def cpu_times() -> tuple[int, int]:
    """Busy ticks and all ticks of the machine's CPUs (proc_stat(5)); idle and iowait are not busy."""
    first = (read_text("/proc/stat") or "").partition("\n")[0].split()[1:9]
    ticks = [int(field) for field in first]
    return sum(ticks) - sum(ticks[3:5]), sum(ticks)


def _make_big(files: Sequence[Entry], destination: Path) -> None:
    """Create the files that several threads write, at their full size."""
    for entry in files:
        with writing(destination, entry):
            os.close(create(str(destination / entry.path), entry.size))


def _finish_big(files: Sequence[Entry], destination: Path) -> None:
    for entry in files:
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
                if piece.of == 1 and piece.length < DIRECT_BYTES:
                    _move_small(work, piece, buffer, tally)
                else:
                    _move_piece(work, piece, buffer, tally)
    except _Stopped:
        return
    except BaseException as error:
        work.failed.append(error)
        work.stop.set()


class _Stopped(Exception):
    """Another thread failed, or the user pressed Ctrl-C."""


def _move_small(work: _Work, piece: Piece, buffer: memoryview, tally: Tally) -> None:
    if work.stop.is_set():
        raise _Stopped
    entry, tree = work.files[piece.file], work.plan.destination
    start = time.perf_counter()
    data = read_small(entry, buffer, as_listed=tree is not None)
    read = time.perf_counter()
    work.digests[piece.file][0] = digest_of(work.plan.checksum, data)
    summed = time.perf_counter()
    if tree is not None:
        write_small(entry, tree, f"{work.root}/{entry.path}", data)
    tally.reading += read - start
    tally.summing += summed - read
    tally.writing += time.perf_counter() - summed
    tally.bytes += piece.length


def _move_piece(work: _Work, piece: Piece, buffer: memoryview, tally: Tally) -> None:
    entry, plan = work.files[piece.file], work.plan
    with Source(
        entry,
        piece,
        past_cache=plan.read_direct,
        ask_cache=plan.ask_cache,
        as_listed=plan.destination is not None,
    ) as source:
        if plan.destination is None:
            _pump(work, piece, buffer, tally, source, None)
        else:
            with Sink(entry, piece, plan.destination, past_cache=plan.write_direct) as sink:
                _pump(work, piece, buffer, tally, source, sink)


def _pump(work: _Work, piece: Piece, buffer: memoryview, tally: Tally, source: Source, sink: Sink | None) -> None:
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
