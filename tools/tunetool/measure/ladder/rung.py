"""The interface of every rung: name, needs, expected time, and a run that measures or skips."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tunetool.measure.aio.ops import Probe, probe
from tunetool.measure.ladder.figures import RungResult
from tunetool.measure.ladder.shots import Shooter
from tunetool.measure.ladder.source import RawData
from tunetool.measure.sequential import Plan
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.machine.drives import Drive


class Skip(Exception):
    """The rung cannot be climbed here; the message is the reason."""


@dataclass(frozen=True)
class Wish:
    """The options of the ladder."""

    limits: Mapping[str, float] = field(default_factory=dict)
    """By measurement name, what its figure is judged against, tolerance taken off."""
    python: Path = Path(sys.executable)
    """The interpreter with the user's torch and deepspeed."""
    require_deepspeed: bool = False
    """Whether a handle of DeepSpeed's that fails is an error."""


@dataclass
class Scene:
    """The run, as rungs see it: its files are written and lie in ``directory``."""

    shape: Plan
    stack: BlockStack
    directory: Path
    file_bytes: int
    shooter: Shooter
    environment: Mapping[str, str]
    wish: Wish
    drives: Sequence[Drive]
    written: float = 0.0
    """Bytes per second of the sequential write; 0 where that was not measured."""
    raw: RawData | None = None
    no_raw: str = ""
    """Why there is none."""

    installed: Probe | None = None
    """What the user's Python has, once it was asked."""

    def probe(self) -> Probe:
        """Ask the user's Python, once. Raises ``Missing``."""
        if self.installed is None:
            self.installed = probe(self.wish.python, self.environment)
        return self.installed

    @property
    def engine(self) -> str:
        """The program that reads and writes, for records."""
        return f"fio {self.shooter.fio.version}"


class Rung(Protocol):
    """One rung, or several that are measured together."""

    @property
    def name(self) -> str:
        """Title for people."""

    def covers(self) -> Sequence[str]:
        """Names of the measurements that are missing where it is skipped."""

    def seconds(self, shape: Plan, drives: int) -> float:
        """About how long it takes."""

    def run(self, scene: Scene) -> RungResult:
        """Measure. Raises ``Skip`` or ``CannotJudge``."""
