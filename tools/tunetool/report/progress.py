"""Progress output on stderr: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn
from rich.text import Text

from tunetool.node.common.refusal import on_one_line
from tunetool.node.units import format_size

if TYPE_CHECKING:
    from tunetool.tune.request import View

_EVERY = 10.0
"""Seconds between two lines of a long step where no bar can be drawn."""


class PlainProgress:
    """One line when a step starts, for logs, pipes and continuous integration."""

    def say(self, line: str) -> None:
        """Print one line."""
        # A name within it may hold line breaks, or a terminal's commands.
        print(on_one_line(line), file=sys.stderr, flush=True)  # noqa: T201

    @contextlib.contextmanager
    def step(self, name: str, seconds: float) -> Iterator[Callable[[], None]]:
        """Announce the step with its expected duration; nothing is printed while it runs."""
        self.say(f"{name} ({seconds:.0f} s)" if seconds >= 1 else name)
        yield lambda: None

    @contextlib.contextmanager
    def moving(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Report the bytes that are done, every ten seconds. The yielded function takes the bytes so far."""
        last = time.monotonic()

        def tick(done: int) -> None:
            nonlocal last
            if time.monotonic() - last >= _EVERY:
                last = time.monotonic()
                self.say(f"{name}: {format_size(done)} of {format_size(total)}")

        yield tick

    def search(self) -> View:
        """Lines of a search."""
        from tunetool.report.tune import PlainView  # noqa: PLC0415  (few commands search)

        return PlainView()


class BarProgress:
    """A bar for the current step. The step redraws it by calling the yielded function: there is no thread."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)

    def say(self, line: str) -> None:
        """Print one line above the bar."""
        self._console.print(Text(on_one_line(line)), soft_wrap=True)

    @contextlib.contextmanager
    def step(self, name: str, seconds: float) -> Iterator[Callable[[], None]]:
        """Show a bar that is full after ``seconds`` and stays so if the step takes longer."""
        columns = (TextColumn("{task.description}", markup=False), BarColumn(30), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True, auto_refresh=False) as bar:
            task = bar.add_task(on_one_line(name), total=max(seconds, 0.1))
            bar.refresh()

            def tick() -> None:
                elapsed = bar.tasks[0].elapsed or 0.0
                bar.update(task, completed=min(elapsed, max(seconds, 0.1)))
                bar.refresh()

            yield tick

    @contextlib.contextmanager
    def moving(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a bar of the bytes that are done, with their rate. The yielded function takes the bytes so far."""
        columns = (TextColumn("{task.description}", markup=False), BarColumn(30), DownloadColumn())
        with Progress(
            *columns, TransferSpeedColumn(), console=self._console, transient=True, auto_refresh=False
        ) as bar:
            task = bar.add_task(on_one_line(name), total=max(total, 1))
            bar.refresh()

            def tick(done: int) -> None:
                bar.update(task, completed=done)
                bar.refresh()

            yield tick

    def search(self) -> View:
        """Lines of a search that are redrawn in place."""
        from tunetool.report.tune import LiveView  # noqa: PLC0415  (few commands search)

        return LiveView()


def best_progress() -> PlainProgress | BarProgress:
    """Bars where stderr is a terminal, lines elsewhere."""
    return BarProgress() if sys.stderr.isatty() else PlainProgress()
