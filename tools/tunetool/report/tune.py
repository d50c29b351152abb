"""The progress of `tune`, on a terminal and elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tunetool.node.units import format_bandwidth
from tunetool.tune.request import View
from tunetool.tune.search import Progressing

_PLAIN_SECONDS = 10.0
"""Seconds between two lines where stderr is no terminal."""
_REDRAW_SECONDS = 0.2


def lines_of(seen: Progressing) -> list[str]:
    """The state of a search: settings tried, best settings so far, seconds left."""
    head = f"{seen.phase}: {seen.tried} of {seen.settings} settings tried, {seen.left:.0f} s left"
    return [
        head,
        *(f"  best {goal}: {settings} at {format_bandwidth(rate)}" for goal, (settings, rate) in seen.best.items()),
    ]


class PlainView(View):
    """Progress as lines, for logs and pipes."""

    def __init__(self) -> None:
        self._last_line = 0.0
        self._phase = ""

    def say(self, line: str) -> None:
        """Print one line."""
        print(line, file=sys.stderr, flush=True)  # noqa: T201

    def update(self, seen: Progressing) -> None:
        """Print a line every ten seconds, and at each new phase."""
        now = time.monotonic()
        if seen.phase != self._phase or now - self._last_line >= _PLAIN_SECONDS:
            self._last_line, self._phase = now, seen.phase
            head, *best = lines_of(seen)
            self.say("; ".join([head, *(line.strip() for line in best)]))


class LiveView(View):
    """Progress as lines that are redrawn in place, by the search's own calls: a thread would disturb fio's fork."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live: Live | None = None
        self._drawn = 0.0

    def say(self, line: str) -> None:
        """Print one line above the progress."""
        self._console.print(Text(line), soft_wrap=True)

    def update(self, seen: Progressing) -> None:
        """Redraw the lines, at most five times a second."""
        now = time.monotonic()
        if self._live is not None and now - self._drawn >= _REDRAW_SECONDS:
            self._drawn = now
            self._live.update(Group(*(Text(line) for line in lines_of(seen))), refresh=True)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Show the progress until the context ends, and then remove it: the result's table replaces it."""
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None


def best_view() -> View:
    """``LiveView`` where stderr is a terminal, ``PlainView`` elsewhere."""
    return LiveView() if sys.stderr.isatty() else PlainView()
