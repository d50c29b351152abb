"""The request of `bench checkpoint`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tunetool.bench.defaults import CHECKPOINT_ROUNDS
from tunetool.measure.session import Run

KIND = "bench.checkpoint"
ROUNDS = CHECKPOINT_ROUNDS

Device = Literal["auto", "cpu", "cuda"]


def gathers(engine: str) -> bool:
    """Whether an engine brings the whole state to one rank, and so is used less often."""
    return engine.endswith("-consolidated")


@dataclass(frozen=True)
class Training:
    """The small training loop with saves."""

    steps: int = 24
    sharded_every: int = 6
    consolidated_every: int = 12
    loops: int = 3
    """Loops with each engine, if there are that many rounds."""
    step_seconds: float = 0.25
    """Work of one step, calibrated on the device before."""

    def every(self, engine: str) -> int:
        """After how many steps that engine saves; 0: never."""
        return self.consolidated_every if gathers(engine) else self.sharded_every

    def saves(self, every: int) -> int:
        """How many saves that makes: none after the last step, where there is nothing to hold."""
        return (self.steps - 1) // every if every else 0


@dataclass(frozen=True)
class Request:
    """The options of the call."""

    model: str
    target: Path | None = None
    """A directory on drives."""
    memory_target: Path | None = None
    """A directory on a memory file system: a stand-in for a medium of that speed."""
    state_bytes: int | None = None
    """Upper bound in bytes; whole layers are dropped until the state fits. None: the whole model."""
    tensors: int | None = None
    """The number of tensors into which the state is cut. None: as the model has them."""
    device: Device = "auto"
    ranks: int = 1
    engines: Sequence[str] = ("*",)
    """Glob patterns of engine names."""
    rounds: int = ROUNDS
    budget: float | None = None
    """Seconds after which no further round begins; the first of each medium is cut there, and keeps what it has."""
    against_fio: bool = False
    training: Training | None = None
    seed: int = 0
    run: Run = field(default_factory=Run)
