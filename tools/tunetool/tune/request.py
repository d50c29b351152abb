"""The request, the view and the result of `tunetool tune`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tunetool.measure import session
from tunetool.measure.aio.spec import Device
from tunetool.measure.session import Run
from tunetool.tune.goals import Mix
from tunetool.tune.pairs import Choice
from tunetool.tune.search import Findings, Progressing
from tunetool.tune.settings import AioSettings


@dataclass(frozen=True)
class Request:
    """What the caller asked for."""

    target: Path
    space: Sequence[AioSettings]
    mix: Mix = field(default_factory=Mix)
    budget: float = 60.0
    """Seconds for the whole run."""
    output: Path | None = None
    """Where the block goes."""
    exhaustive: bool = False
    driver: Literal["deepspeed", "fio"] = "deepspeed"
    device: Device = "cpu"
    processes: int = 1
    io_bytes: int = 0
    """Of one transfer; 0: by the storage's speed."""
    python: Path = Path(sys.executable)
    seed: int = 0
    run: Run = field(default_factory=Run)


@dataclass(frozen=True)
class Result(session.Result):
    """The record, and what was found where nothing went wrong."""

    findings: Findings | None = None
    mix: Mix = field(default_factory=Mix)

    @property
    def choice(self) -> Choice | None:
        """What the block holds."""
        return self.findings.choices.get(self.mix.goals[-1]) if self.findings else None


class View:
    """The progress of a search. tunetool.report.tune implements it for terminals and logs."""

    def say(self, line: str) -> None:
        """One line for people."""

    def update(self, seen: Progressing) -> None:
        """The search went on by one sample."""

    def tick(self) -> None:
        """Time passed."""

    @contextmanager
    def step(self, name: str, seconds: float) -> Iterator[Callable[[], None]]:
        """A short step before the search: time passes."""
        yield self.tick

    @contextmanager
    def open(self) -> Iterator[None]:
        """While the search runs."""
        yield
