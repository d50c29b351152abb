"""Threads that count themselves, so that a caller knows for certain whether they still use its buffers and files.

Before Python 3.13, ``Thread.join`` and ``is_alive`` take a running thread for an ended one once Ctrl-C, or a signal
handler that raises, has interrupted a ``join`` of it (gh-90882).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


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

    def wait(self) -> None:
        """Wait until no thread runs. An interruption ends the wait; it may be repeated."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running)

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
