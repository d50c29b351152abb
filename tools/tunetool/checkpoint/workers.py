"""Threads that count themselves, so that a caller knows for certain whether they still use its buffers and files.

Before Python 3.13, ``Thread.join`` and ``is_alive`` take a running thread for an ended one once Ctrl-C, or a signal
handler that raises, has interrupted a ``join`` of it (gh-90882).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

BUFFER_BYTES = 8 << 20
"""Bytes of one host buffer, unless the caller asks for another size."""


def local_ranks() -> int:
    """Ranks of this job on this machine, by the variable that launchers set."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))


def default_threads() -> int:
    """Default number of threads: this rank's share of the cores, from 4 to 16, since threads mostly wait for
    storage."""
    return min(16, max(4, len(os.sched_getaffinity(0)) // local_ranks()))


class Workers:
    """One thread for each function of ``works``; ``daemon``: the interpreter does not wait for them at its end."""

    def __init__(self, works: Sequence[Callable[[], None]], name: str, *, daemon: bool = False) -> None:
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"{name}-{number}", daemon=daemon)
            for number, work in enumerate(works)
        ]
        self._running = 0
        self._changed = threading.Condition()

    def start(self) -> None:
        """Raises ``RuntimeError`` if the system gives no more threads; those before it run."""
        for thread in self._threads:
            self._count(1)
            try:
                thread.start()
            except Exception:
                self._count(-1)
                raise

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until no thread runs, or at most that long; returns whether none runs. An interruption ends the wait; it
        may be repeated."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, seconds)

    def include_this_thread(self) -> bool:
        """Whether the caller is one of them, which would wait for itself."""
        return threading.current_thread() in self._threads

    @property
    def are_running(self) -> bool:
        return self._running > 0

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._changed:
            self._running += more
            self._changed.notify_all()
