"""The request of `bench loading`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tunetool.bench.defaults import CHECKPOINT_ROUNDS
from tunetool.measure.session import Run

KIND = "bench.loading"
ROUNDS = CHECKPOINT_ROUNDS

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class Request:
    """The options of the call."""

    model: str
    """A size of the reference model, which is made; or a directory with .safetensors files, read where it is."""
    target: Path | None = None
    """A directory on drives where the model is made."""
    memory_targets: Sequence[Path] = ()
    """Directories in memory: a tmpfs without huge pages and one with them, for example."""
    device: Device = "auto"
    gpus: Sequence[int] = (1,)
    """How many GPUs load at the same time, each the whole model; on CPUs, how many processes."""
    engines: Sequence[str] = ("*",)
    """Glob patterns of engine names."""
    rounds: int = ROUNDS
    seed: int = 0
    run: Run = field(default_factory=Run)
