"""Copies the data: many threads, each with one buffer that it reads a block into, hashes and writes.

Where there are many small files, other processes copy those, one for each thread.
"""

from __future__ import annotations

import math
import mmap
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.measure.worker import Missing, Worker, child_command
from tunetool.node.common.files import read_text
from tunetool.node.common.waiting import wait_for
from tunetool.stage.ends import DIRECT_BYTES, Sink, Source, Tally, create, move_small, writing
from tunetool.stage.pieces import Checksum, Piece, cut, hasher, piece_bytes
from tunetool.stage.tree import Entry

LEAST_FILES = 5000
"""From so many small files on the processes pay."""
_FILES_OF_ONE = 1000
"""Files for which a further process pays: its start takes some 0.06 s of CPU, as long as so many files."""
_PATIENCE = math.inf
"""Seconds that a batch of small files may take: a thread waits as long for a source that does not answer."""
_CHILD = Path(__file__).resolve().with_name("child.py")


class Helper:
    """One such process. For one thread at a time."""

    def __init__(self, worker: Worker, root: Path | None, checksum: Checksum) -> None:
        self._worker, self._checksum = worker, checksum
        self._root = None if root is None else _bytes_of(str(root))
        self._cpu = 0.0

    def move(self, files: Sequence[Entry], tally: Tally, tick: Callable[[], None]) -> list[str]:
        """Read the files and write them below the root, if there is one. Returns their checksums.

        ``tick`` is called a few times a second; what it raises ends the wait. Raises ``CannotJudge`` as ``move_small``
        does, and where the process has ended.
        """
        fields = [(_bytes_of(each.path), _bytes_of(each.origin), *each[2:5], *each[7:]) for each in files]
        self._worker.tick = tick
        answer = self._worker.ask({"root": self._root, "checksum": self._checksum, "files": fields}, _PATIENCE)
        if "refused" in answer:
            raise CannotJudge(answer["refused"], answer["hint"])
        tally.add(Tally(**answer["tally"]))
        tally.helper_cpu += answer["cpu"] - self._cpu
        self._cpu = answer["cpu"]
        digests: list[str] = answer["digests"]
        return digests


def start_helpers(small: int, threads: int, root: Path | None, checksum: Checksum, stack: ExitStack) -> list[Helper]:
    """Start them, for ``small`` files and as many threads; ``stack`` ends them. None where they would not pay."""
    if small < LEAST_FILES or threads < 2:
        return []
    command = child_command(Path(sys.executable), _CHILD)
    # Of the same tunetool as this one, however it was found.
    path = [str(_CHILD.parents[2]), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    # As many as there are threads: the files of a source far away wait for its answers.
    count = max(2, min(threads, small // _FILES_OF_ONE))
    what = "a process that copies small files"
    helpers: list[Helper] = []
    # Where the machine allows no further process (`ulimit -u`), those that started do the work, or else the threads.
    with suppress(Missing):
        for _ in range(count):
            helpers.append(Helper(stack.enter_context(Worker(command, what, environment)), root, checksum))
    return helpers


def _bytes_of(name: str) -> str:
    """For JSON: a byte a letter. Both processes need not have the same locale."""
    return os.fsencode(name).decode("latin-1")


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
    root: str
    jobs: queue.SimpleQueue[list[Piece]] = field(default_factory=queue.SimpleQueue)
    batches: queue.SimpleQueue[list[Piece]] = field(default_factory=queue.SimpleQueue)
    """Jobs with small files."""
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
    work = _Work(files, plan, digests, str(plan.destination))
    if plan.destination is not None:
        _make_big(big, plan.destination)
    small = 0
    for job in jobs:
        in_job = sum(map(_is_small, job))
        (work.batches if in_job else work.jobs).put(job)
        small += in_job
    tallies = [Tally() for _ in range(max(1, min(plan.threads, len(jobs))))]
    started, cpu, jiffies = time.perf_counter(), time.process_time(), cpu_times()
    with ExitStack() as stack:
        helpers = start_helpers(small, len(tallies), plan.destination, plan.checksum, stack)
        # With helpers, threads without one leave the small files alone.
        _work_through(work, tallies, helpers or [None] * len(tallies), tick)
    if work.failed:
        raise work.failed[0]
    whole = Tally()
    for tally in tallies:
        whole.add(tally)
    if plan.destination is not None:
        _finish_big(big, plan.destination)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu + whole.helper_cpu
    busy_ticks, all_ticks = (after - before for after, before in zip(cpu_times(), jiffies, strict=True))
    return Moved(work.digests, whole, seconds, cpu_seconds, busy_ticks / max(all_ticks, 1))


def _work_through(
    work: _Work, tallies: Sequence[Tally], helpers: Sequence[Helper | None], tick: Callable[[int], None]
) -> None:
    """Start a thread for each tally, and wait until all have ended. The first ``helpers`` threads take small files."""
    threads = [
        threading.Thread(target=_worker, args=(work, tally, helpers[number : number + 1]), daemon=True)
        for number, tally in enumerate(tallies)
    ]
    last_tick = started = time.perf_counter()
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
        wait_for(lambda: not any(thread.is_alive() for thread in threads), _STOP_SECONDS, 0.01)
        raise


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


def _worker(work: _Work, tally: Tally, helpers: Sequence[Helper | None]) -> None:
    """Until nothing is left. ``helpers``: None copies small files in this thread; empty leaves them to others."""
    try:
        # Anonymous memory starts on a page, as direct I/O wants it. It is not closed: an error's traceback holds views.
        buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        for jobs in (work.jobs, work.batches) if helpers else (work.jobs,):
            while not work.stop.is_set():
                try:
                    job = jobs.get_nowait()
                except queue.Empty:
                    break
                helper = helpers[0] if helpers else None
                if helper is not None:
                    _help(work, helper, [piece for piece in job if _is_small(piece)], tally)
                for piece in job:
                    if not _is_small(piece):
                        _move_piece(work, piece, buffer, tally)
                    elif helper is None:
                        _move_small(work, piece, buffer, tally)
    except _Stopped:
        return
    except BaseException as error:
        work.failed.append(error)
        work.stop.set()


def _is_small(piece: Piece) -> bool:
    return piece.of == 1 and piece.length < DIRECT_BYTES


class _Stopped(Exception):
    """Another thread failed, or the user pressed Ctrl-C."""


def _help(work: _Work, helper: Helper, pieces: Sequence[Piece], tally: Tally) -> None:
    def tick() -> None:
        if work.stop.is_set():
            raise _Stopped

    if not pieces:
        return
    digests = helper.move([work.files[piece.file] for piece in pieces], tally, tick)
    for piece, digest in zip(pieces, digests, strict=True):
        work.digests[piece.file][0] = digest


def _move_small(work: _Work, piece: Piece, buffer: memoryview, tally: Tally) -> None:
    if work.stop.is_set():
        raise _Stopped
    plan = work.plan
    digest = move_small(work.files[piece.file], plan.destination, work.root, plan.checksum, buffer, tally)
    work.digests[piece.file][0] = digest


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
            tally.hole_bytes += sink.put(buffer[:count], piece.offset + done)
        tally.reading += read - start
        tally.summing += summed - read
        tally.writing += time.perf_counter() - summed
        tally.bytes += count
        tally.direct_bytes += count if source.direct is not None else 0
        done += count
    source.check_end()
    work.digests[piece.file][piece.number] = digest.hexdigest()
