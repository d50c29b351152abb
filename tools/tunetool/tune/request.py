"""The request, the view and the result of `tunetool tune`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from tunetool.measure import session
from tunetool.measure.aio.spec import Device
from tunetool.measure.progress import Progress
from tunetool.measure.session import Run
from tunetool.tune.goals import Mix
from tunetool.tune.pairs import Choice
from tunetool.tune.search import Findings, Progressing
from tunetool.tune.settings import AioSettings

FIGURES = {
    "B/s": ("bandwidth", "ceiling"),
    "1": ("gain",),
}
"""Figures of its records, by unit."""


@dataclass(frozen=True)
class Request:
    """The options of the call."""

    target: Path
    space: Sequence[AioSettings]
    mix: Mix = field(default_factory=Mix)
    budget: float = 60.0
    """Seconds for the whole run."""
    output: Path | None = None
    """File for the block; None: none."""
    exhaustive: bool = False
    driver: Literal["deepspeed", "fio"] = "deepspeed"
    device: Device = "cpu"
    processes: int = 1
    io_bytes: int = 0
    """Bytes of one transfer; 0: chosen by the storage's speed."""
    python: Path = Path(sys.executable)
    seed: int = 0
    run: Run = field(default_factory=Run)


@dataclass(frozen=True)
class Result(session.Result):
    """The record, and the choice if there was no error."""

    findings: Findings | None = None
    mix: Mix = field(default_factory=Mix)

    @property
    def choice(self) -> Choice | None:
        """The settings of the block."""
        return self.findings.choices.get(self.mix.goals[-1]) if self.findings else None


class View:
    """The progress of a search. tunetool.report.tune implements it for terminals and logs."""

    def say(self, line: str) -> None:
        """Print one line."""

    def update(self, seen: Progressing) -> None:
        """Called after each sample of the search."""

    def tick(self) -> None:
        """Called while time passes."""

    @contextmanager
    def step(self, name: str, seconds: float) -> Iterator[Callable[[], None]]:
        """A context for a short step before the search."""
        yield self.tick

    @contextmanager
    def open(self) -> Iterator[None]:
        """A context for the search."""
        yield


class SearchProgress(Progress, Protocol):
    """The progress of a measurement that begins with a search."""

    def search(self) -> View:
        """The search's view, on the same terminal or in the same log."""
