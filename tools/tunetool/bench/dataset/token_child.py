"""Reads samples of tokens from one file by one engine, for the benchmark; in a process that is fresh for each pass.

``answer`` takes an order and returns what goes back as JSON (see ``measure/child_server.py``): ``start`` draws the
order of the samples and measures the same program where no storage answers; ``pass`` reads, which alone is timed;
``check`` reads a few samples again and returns their bytes' sum.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import random
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor  # noqa: TID251  (in a session of its own, where no Ctrl-C comes)
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from tunetool.measure.process_reads import counted_reads

BLOCK = 4096
"""Offsets and lengths of direct reads are multiples of it."""
MOST_SAMPLES = 2_000_000
"""Samples whose order is drawn; no pass takes more."""
_NO_STORAGE = "/dev/zero"
_CEILING_SECONDS, _CEILING_BYTES = 0.15, 64 << 20
_CHECKED = 64
AHEAD = 64
"""How many samples before its use a sample is advised."""
_AHEAD_OF_USE = "willneed"
MOST_AHEAD = 0.1
"""Share of a cold file that the kernel may read beside shuffled samples, before the pass ends: later ones would more
and more come from the page cache, as they do not where the data is larger than memory."""
_LOOK_SECONDS = 0.01
"""Between two looks at what was read ahead; each takes about 20 us."""

Advise = Callable[[int, int], None]
Read = Callable[[Sequence[int], float], int]
"""Hands out the samples of these numbers until the clock says so, and returns how many."""


class _Here:
    """The order of this process."""

    file = ""
    engine: Mapping[str, Any] = {}
    size = 0
    numbers: Sequence[int] = ()
    most_ahead: float | None = None
    """Bytes beside the samples that may be fetched in a pass; None: any."""


def draw_numbers(count: int, order: str, seed: int) -> Sequence[int]:
    """The numbers of samples in the order in which they are read, each once."""
    if order == "sequential":
        return range(min(count, MOST_SAMPLES))
    return random.Random(seed).sample(range(count), min(count, MOST_SAMPLES))  # noqa: S311  (an order, no secret)


@contextmanager
def mapped(path: str, advice: str) -> Iterator[tuple[memoryview, Advise | None]]:
    """The whole file in memory, as Megatron and numpy map it, with one advice for madvise(2) or none.

    ``willneed`` is not for the whole file, of which the kernel would read only the first MiB or so: what comes beside
    the memory gives it for one sample.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with mmap.mmap(handle, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as memory:
            if advice and advice != _AHEAD_OF_USE:
                memory.madvise(getattr(mmap, f"MADV_{advice.upper()}"))
            with memoryview(memory) as view:
                yield view, _advise_on(memory) if advice == _AHEAD_OF_USE else None
    finally:
        os.close(handle)


def _advise_on(memory: mmap.mmap) -> Advise:
    def advise(start: int, length: int) -> None:
        inside = start % mmap.PAGESIZE
        memory.madvise(mmap.MADV_WILLNEED, start - inside, inside + length)

    return advise


def copy_samples(
    view: memoryview,
    numbers: Sequence[int],
    into: bytearray,
    deadline: float,
    advise: Advise | None = None,
    is_over: Callable[[int], bool] | None = None,
) -> int:
    """Copy one sample after another out of mapped memory, as a collate function does; how many. ``into`` has the size
    of a sample, and the last one at the end.

    ``advise`` is called for each sample some samples before it is copied; ``is_over`` with the number of samples now
    and then, and may end the copying before ``deadline``.
    """
    target, size, clock, done = memoryview(into), len(into), time.perf_counter, 0
    look = deadline if is_over is None else 0.0
    coming = iter(numbers)
    if advise is not None:
        for number in itertools.islice(coming, AHEAD):
            advise(number * size, size)
    for number in numbers:
        if advise is not None and (later := next(coming, None)) is not None:
            advise(later * size, size)
        start = number * size
        target[:] = view[start : start + size]
        done += 1
        if (now := clock()) > look:
            if now > deadline or is_over is None or is_over(done):
                break
            look = min(deadline, now + _LOOK_SECONDS)
    return done


def read_opened(
    path: str, numbers: Sequence[int], into: bytearray, deadline: float, is_over: Callable[[int], bool] | None = None
) -> int:
    """The same as ``copy_samples``, by a file that is opened for each sample, as Megatron's ``_FileBinReader`` does."""
    size, clock, done = len(into), time.perf_counter, 0
    look = deadline if is_over is None else 0.0
    for number in numbers:
        with open(path, "rb", buffering=0) as stream:  # noqa: PTH123  (as the reader that is measured)
            stream.seek(number * size)
            if stream.readinto(into) != size:
                raise OSError(f"sample {number} came in part")
        done += 1
        if (now := clock()) > look:
            if now > deadline or is_over is None or is_over(done):
                break
            look = min(deadline, now + _LOOK_SECONDS)
    return done


def read_directly(handle: int, numbers: Sequence[int], size: int, deadline: float) -> int:
    """One thread's share of direct reads; how many. A sample that begins within a block is read with whole blocks."""
    buffer, clock, done = mmap.mmap(-1, size + 2 * BLOCK), time.perf_counter, 0
    with closing(buffer), memoryview(buffer) as memory:
        for number in numbers:
            _read_sample(handle, memory, number * size, size)
            done += 1
            if clock() > deadline:
                break
    return done


def _read_sample(handle: int, memory: memoryview, offset: int, size: int) -> memoryview:
    start = offset - offset % BLOCK
    length = -(-(offset + size - start) // BLOCK) * BLOCK
    came = 0
    while came < offset + size - start:
        count = os.preadv(handle, [memory[came:length]], start + came)
        if not count:
            raise OSError(f"the file ends at byte {start + came}, within a sample")
        came += count
    return memory[offset - start : offset - start + size]


def _in_threads(path: str, flags: int, threads: int, size: int) -> Read:
    def read(numbers: Sequence[int], deadline: float) -> int:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
        try:
            with ThreadPoolExecutor(threads) as pool:
                shares = [numbers[first::threads] for first in range(threads)]
                jobs = [pool.submit(read_directly, handle, share, size, deadline) for share in shares]
                return sum(job.result() for job in jobs)
        finally:
            os.close(handle)

    return read


def samples_without_storage(engine: Mapping[str, Any], size: int, numbers: Sequence[int]) -> float:
    """Samples per second of the same program where nothing but memory answers."""
    started = time.perf_counter()
    deadline = started + _CEILING_SECONDS
    if engine["direct"]:
        done = _in_threads(_NO_STORAGE, 0, engine["threads"], size)(numbers, deadline)
        return done / (time.perf_counter() - started)
    count = max(1, min(len(numbers), _CEILING_BYTES // size))
    if engine["opened"]:
        return _opened_without_storage(size, count, numbers)
    with mmap.mmap(-1, count * size) as memory:
        memory[:: mmap.PAGESIZE] = b"\1" * len(range(0, len(memory), mmap.PAGESIZE))
        drawn = [number % count for number in numbers[:MOST_SAMPLES]]
        done, started = 0, time.perf_counter()
        deadline = started + _CEILING_SECONDS
        with memoryview(memory) as view:
            # At least one, however late this thread gets its turn.
            while not done or time.perf_counter() < deadline:
                done += copy_samples(view, drawn, bytearray(size), deadline)
        return done / (time.perf_counter() - started)


def _opened_without_storage(size: int, count: int, numbers: Sequence[int]) -> float:
    handle = os.memfd_create("tunetool-ceiling")
    try:
        with os.fdopen(handle, "wb", closefd=False) as stream:
            for _ in range(count):
                stream.write(bytes(size))
        path, into, done = f"/proc/self/fd/{handle}", bytearray(size), 0
        drawn = [number % count for number in numbers[:MOST_SAMPLES]]
        started = time.perf_counter()
        deadline = started + _CEILING_SECONDS
        while not done or time.perf_counter() < deadline:
            done += read_opened(path, drawn, into, deadline)
        return done / (time.perf_counter() - started)
    finally:
        os.close(handle)


def spent() -> tuple[int, int, float]:
    """Major and minor page faults and CPU seconds of this process and the children that ended."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return (
        sum(each.ru_majflt for each in both),
        sum(each.ru_minflt for each in both),
        sum(each.ru_utime + each.ru_stime for each in both),
    )


def counted(work: Callable[[], int]) -> dict[str, Any]:
    """Do ``work``, which returns how many samples it handed out, between two looks at the kernel's counters."""
    fetched, (major, minor, cpu) = counted_reads(), spent()
    started = time.perf_counter()
    done = work()
    seconds = time.perf_counter() - started
    after, (major_after, minor_after, cpu_after) = counted_reads(), spent()
    return {
        "seconds": seconds,
        "samples": done,
        "fetched": None if fetched is None or after is None else after.since(fetched).storage,
        "major_faults": major_after - major,
        "minor_faults": minor_after - minor,
        "cores": (cpu_after - cpu) / seconds,
    }


def _huge_bytes() -> dict[str, int]:
    """Bytes that this process maps on huge pages of files, and on those of the kernel's pool (proc(5))."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
        kib = {name: int(value.split()[0]) for name, value in lines.items()}
    except (OSError, ValueError, IndexError):
        return {}
    pool = kib.get("Shared_Hugetlb", 0) + kib.get("Private_Hugetlb", 0)
    return {"huge_bytes": kib.get("FilePmdMapped", 0) << 10, "pool_bytes": pool << 10}


def start(order: Mapping[str, Any]) -> dict[str, Any]:
    """See the module."""
    _Here.file, _Here.engine, _Here.size = order["file"], order["engine"], order["sample_bytes"]
    _Here.numbers = draw_numbers(order["count"], _Here.engine["order"], order["seed"])
    _Here.most_ahead = None
    if order.get("state") == "cold" and _Here.engine["order"] == "shuffled":
        announced = AHEAD * _Here.size if _Here.engine["advice"] == _AHEAD_OF_USE else 0
        _Here.most_ahead = MOST_AHEAD * Path(_Here.file).stat().st_size + announced
    if _Here.engine["advice"]:
        try:
            with mmap.mmap(-1, mmap.PAGESIZE) as memory:
                memory.madvise(getattr(mmap, f"MADV_{_Here.engine['advice'].upper()}"))
        except (OSError, AttributeError) as error:
            return {"left_out": f"this kernel or this Python has no MADV_{_Here.engine['advice'].upper()}: {error}"}
    return {"ceiling": samples_without_storage(_Here.engine, _Here.size, _Here.numbers)}


def take_pass(seconds: float) -> dict[str, Any]:
    """See the module."""
    file, engine, size, numbers = _Here.file, _Here.engine, _Here.size, _Here.numbers
    huge: dict[str, int] = {}
    is_over = None if _Here.most_ahead is None else _beyond(_Here.most_ahead, size)
    if engine["direct"]:
        read = _in_threads(file, os.O_DIRECT, engine["threads"], size)
        answered = counted(lambda: read(numbers, time.perf_counter() + seconds))
    elif engine["opened"]:
        into = bytearray(size)
        answered = counted(lambda: read_opened(file, numbers, into, time.perf_counter() + seconds, is_over))
    else:
        # The mapping stays until its pages were counted, which takes no part of the time.
        with ExitStack() as held:

            def work() -> int:
                deadline = time.perf_counter() + seconds
                view, advise = held.enter_context(mapped(file, engine["advice"]))
                return copy_samples(view, numbers, bytearray(size), deadline, advise, is_over)

            answered = counted(work)
            huge = _huge_bytes()
    read_ahead = is_over is not None and is_over(answered["samples"])
    return {**answered, **huge, "bytes": answered["samples"] * size, "ended_by_read_ahead": read_ahead}


def _beyond(most: float, size: int) -> Callable[[int], bool]:
    """Whether, after so many samples, this process has fetched more than ``most`` bytes beside them since now."""
    before = counted_reads()

    def is_over(samples: int) -> bool:
        now = counted_reads()
        return before is not None and now is not None and now.since(before).storage - samples * size > most

    return is_over


def check(done: int) -> dict[str, Any]:
    """A sum over the bytes of some of the samples that the pass handed out, read in the same way."""
    numbers = checked_numbers(_Here.numbers[:done])
    size, whole = _Here.size, hashlib.sha256()
    if _Here.engine["direct"]:
        handle = os.open(_Here.file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        with closing(mmap.mmap(-1, size + 2 * BLOCK)) as buffer, memoryview(buffer) as memory:
            for number in numbers:
                with _read_sample(handle, memory, number * size, size) as read:
                    whole.update(read)
        os.close(handle)
    elif _Here.engine["opened"]:
        for number in numbers:
            read_opened(_Here.file, [number], sample := bytearray(size), 0.0)
            whole.update(sample)
    else:
        with mapped(_Here.file, _Here.engine["advice"]) as (view, _advise):
            sample = bytearray(size)
            for number in numbers:
                copy_samples(view, [number], sample, 0.0)
                whole.update(sample)
    return {"numbers": numbers, "sha256": whole.hexdigest()}


def checked_numbers(numbers: Sequence[int]) -> list[int]:
    """Some of them, spread over all, the last included."""
    step = max(1, len(numbers) // _CHECKED)
    return [*numbers[::step], *numbers[-1:]]


def answer(order: Mapping[str, Any]) -> dict[str, Any]:
    """See the module."""
    if order["do"] == "start":
        return start(order)
    if order["do"] == "pass":
        return take_pass(order["seconds"])
    return check(order["samples"])
