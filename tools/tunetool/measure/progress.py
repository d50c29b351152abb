"""Progress of a measurement, for the person who waits; tunetool.report.progress implements it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class Progress(Protocol):
    """Receives progress: for a terminal, a log, or nothing."""

    def say(self, line: str) -> None:
        """Print one line."""

    def step(self, name: str, seconds: float) -> AbstractContextManager[Callable[[], None]]:
        """A step that is expected to take ``seconds``. The step must call the given function often.

        A call instead of a thread that redraws: fio is started by fork, which threads make unsafe.
        """


class MovingProgress(Progress, Protocol):
    """One that also shows how many of a known number of bytes are done."""

    def moving(self, name: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """A step over ``total`` bytes. Whoever does the step calls what it is handed with the bytes done, often."""
