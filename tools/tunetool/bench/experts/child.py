"""Reads experts by several threads into memory of its own: a program of ``measure/child_server.py``.

Standard library alone. ``answer`` takes an order: ``open`` a file, read all experts in a ``random`` order, ``fill`` a
cache, ``replay`` a trace, ``check`` what the cache holds. Seconds are from before the first read to the end of the
last.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor  # noqa: TID251  (in a session of its own, where no Ctrl-C comes)
from queue import SimpleQueue
from typing import Any

PAGE = 4096
_STAMP = struct.Struct("<QQ")


def stamp(memory: bytearray, expert: int, first_page: int) -> None:
    """Write into each page of ``memory`` which expert and which page of it this is."""
    for number in range(len(memory) // PAGE):
        _STAMP.pack_into(memory, number * PAGE, expert, first_page + number)


class Reader:
    """An open file of experts, memory for some of them, and threads."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._block, self._threads = int(order["block"]), int(order["threads"])
        self._handles = {
            "buffered": os.open(order["path"], os.O_RDONLY | os.O_CLOEXEC),
            "direct": os.open(order["path"], os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT),
        }
        self._memory = [_memory(self._block) for _ in range(order["slots"])]
        self._pool = ThreadPoolExecutor(self._threads)
        self._free: SimpleQueue[int] = SimpleQueue()
        for slot in range(self._threads):
            self._free.put(slot)

    def random(self, mode: str, order: Sequence[int], whole: bool) -> dict[str, Any]:
        """Read the experts in this order, each by one thread; ``whole``: look at every page of them."""
        started = time.perf_counter()
        results = list(self._pool.map(lambda expert: self._one(self._handles[mode], expert, whole), order))
        return {
            "seconds": time.perf_counter() - started,
            "latencies": [seconds for seconds, _ in results],
            "wrong": sum(wrong for _, wrong in results),
        }

    def fill(self, held: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Read experts into their slots."""
        list(self._pool.map(lambda pair: self._read(self._handles["direct"], pair[0], pair[1], 0, self._block), held))
        return {}

    def replay(self, steps: Sequence[Sequence[tuple[int, int, bool]]]) -> dict[str, Any]:
        """Go through the steps; what is missing in one is read at the same time, by all threads."""
        latencies, wrong = [], 0
        started = time.perf_counter()
        for step in steps:
            began = time.perf_counter()
            missing = [(expert, slot) for expert, slot, is_hit in step if not is_hit]
            for reading in [self._pool.submit(self._read, *part) for part in self._parts(missing)]:
                reading.result()
            latencies.append(time.perf_counter() - began)
            wrong += sum(self._is_wrong(expert, slot, whole=False) for expert, slot, _ in step)
        return {"seconds": time.perf_counter() - started, "latencies": latencies, "wrong": wrong}

    def check(self, held: Sequence[Sequence[int]]) -> dict[str, Any]:
        """How many slots do not hold every page of their expert."""
        return {"wrong": sum(self._is_wrong(expert, slot, whole=True) for expert, slot in held)}

    def _parts(self, missing: Sequence[tuple[int, int]]) -> Iterable[tuple[int, int, int, int, int]]:
        """Arguments of ``_read``: each expert is cut so that all threads have something to do."""
        if not missing:
            return
        pages = -(-self._block // PAGE)
        length = PAGE * -(-pages // max(1, self._threads // len(missing)))
        for expert, slot in missing:
            for start in range(0, self._block, length):
                yield self._handles["direct"], expert, slot, start, min(self._block, start + length)

    def _one(self, handle: int, expert: int, whole: bool) -> tuple[float, bool]:
        slot = self._free.get()
        try:
            started = time.perf_counter()
            self._read(handle, expert, slot, 0, self._block)
            seconds = time.perf_counter() - started
            return seconds, self._is_wrong(expert, slot, whole)
        finally:
            self._free.put(slot)

    def _read(self, handle: int, expert: int, slot: int, start: int, end: int) -> None:
        with memoryview(self._memory[slot]) as memory:
            while start < end:
                with memory[start:end] as rest:
                    count = os.preadv(handle, [rest], expert * self._block + start)
                if count == 0:
                    raise OSError(f"the file ends within expert {expert}")
                start += count

    def _is_wrong(self, expert: int, slot: int, whole: bool) -> bool:
        """Whether the first page or the last, or with ``whole`` any page, is not that of the expert."""
        pages, memory = self._block // PAGE, self._memory[slot]
        looked_at = range(pages) if whole else (0, pages - 1)
        return any(_STAMP.unpack_from(memory, page * PAGE) != (expert, page) for page in looked_at)


def _memory(size: int) -> mmap.mmap:
    """Pages of this process, there from the beginning, so that no read waits for them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for offset in range(0, size, PAGE):
        memory[offset] = 1
    return memory


_opened: list[Reader] = []


def answer(order: Mapping[str, Any]) -> dict[str, Any]:
    """See the module."""
    if order["do"] == "open":
        _opened.append(Reader(order))
        return {}
    (reader,) = _opened
    if order["do"] == "random":
        return reader.random(order["mode"], order["order"], order["whole"])
    if order["do"] == "replay":
        return reader.replay(order["steps"])
    return reader.fill(order["held"]) if order["do"] == "fill" else reader.check(order["held"])
