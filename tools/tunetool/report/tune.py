"""The progress of `tune`, on a terminal and elsewhere, and its result for people."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tunetool.node.units import format_bandwidth
from tunetool.record import Measurement, Record, chosen
from tunetool.report.page import new_table, print_block
from tunetool.report.table import print_verdict_line
from tunetool.tune.outcome import GAIN
from tunetool.tune.pairs import SHOWN
from tunetool.tune.request import View
from tunetool.tune.search import Progressing
from tunetool.tune.settings import DEFAULTS, AioSettings, from_block

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


def print_tune(record: Record, path: Path | None, console: Console, written: Path | None = None) -> None:
    """Print the result for each goal, the checks, and the verdict.

    ``path``: where the record is; ``written``: the file with the aio block, where one was written.
    """
    console.print(Text(f"{record.node.host}: `{record.target}`"), soft_wrap=True)
    gains = gains_of(record)
    if gains:
        console.print(_table(gains))
        for line in footnotes(record, gains):
            print_block(console, line, 2)
    for check in record.checks:
        print_block(console, f"{check.id}: {check.found}", 2)
    if written is not None and gains and record.verdict and record.verdict.status == "pass":
        print_block(console, f"written: {written}", 2)
    print_verdict_line(record, path, console)


def gains_of(record: Record) -> list[Measurement]:
    """For each goal the choice, held against DeepSpeed's default; the block is written for the last one."""
    return chosen(record.measurements, GAIN, subject="tune")


def settings_of(figure: Measurement) -> AioSettings:
    """The settings that a figure of a search is about."""
    return from_block({name: figure.parameters[name] for name in DEFAULTS.block()})  # type: ignore[misc]


TITLES = ("goal", "block x depth x threads", "GB/s", "default", "ratio", "from", "to", "result")
NUMBERS = TITLES[2:-1]
"""Titles of the columns with figures."""


def gain_cells(gain: Measurement) -> tuple[str, ...]:
    """The cells of a goal, for the columns ``TITLES``."""
    parameters = gain.parameters
    better = bool(parameters["significant"])
    interval = gain.confidence
    return (
        str(parameters["goal"]),
        str(settings_of(gain)) if better else "DeepSpeed's default",
        f"{float(parameters['rate']) / 1e9:.3f}",
        f"{float(parameters['default_rate']) / 1e9:.3f}",
        f"{gain.value:.3f}",
        f"{interval.low:.3f}" if interval else "",
        f"{interval.high:.3f}" if interval else "",
        "faster" if better else "no significant difference",
    )


def _table(gains: list[Measurement]) -> Table:
    table = new_table()
    for title in TITLES:
        table.add_column(title, justify="right" if title in NUMBERS else "left", overflow="fold")
    for gain in gains:
        table.add_row(*gain_cells(gain))
    return table


def _level(gains: list[Measurement]) -> str:
    """The lowest level of the intervals: a few pairs reach none that is high."""
    levels = [gain.confidence.level for gain in gains if gain.confidence and gain.confidence.level is not None]
    return f"{min([SHOWN, *levels]):.0%}"


def footnotes(record: Record, gains: list[Measurement]) -> list[str]:
    """How the pairs were measured, and what the drives counted."""
    figures = [each for each in record.measurements if each.evidence is not None]
    claimed = sum(each.evidence.claimed_bytes or 0 for each in figures if each.evidence)
    counted = sum(each.evidence.counted_bytes or 0 for each in figures if each.evidence)
    thrown = figures[0].parameters["samples_thrown_away"] if figures else 0
    mix = gains[-1].parameters["mix"]
    return [
        f"{gains[0].engine}; mix {mix}; ratio: median over pairs with DeepSpeed's default, {_level(gains)} interval",
        f"evidence: block {counted / claimed:.4f} over {sum(len(each.samples or []) for each in figures)} samples, "
        f"{thrown} discarded (other I/O)"
        if claimed
        else "evidence: none",
    ]
