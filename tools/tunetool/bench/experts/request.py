"""The request of `bench experts`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.bench.defaults import CHECKPOINT_ROUNDS, EXPERT_THREADS, EXPERTS
from tunetool.measure.session import Run

KIND = "bench.experts"


@dataclass(frozen=True)
class Request:
    """The options of the call."""

    target: Path
    drive_targets: Sequence[Path] = ()
    """Directories on single drives, whose random reads are compared with the target's."""
    config: Path | None = None
    """A model's config.json, or its directory."""
    expert_bytes: int | None = None
    """Of one expert; None: the model's, or ``defaults.EXPERT_BYTES``."""
    experts: int = EXPERTS
    threads: int = EXPERT_THREADS
    top_k: int | None = None
    """Experts that a step wants; None: the model's, or ``defaults.TOP_K``."""
    cached: Sequence[int] | None = None
    """Numbers of experts that the cache holds; None: shares of ``experts``."""
    steps: int | None = None
    """Steps of a trace in a round; None: so many that each expert is wanted twice on average."""
    zipf: float = 1.0
    """Exponent of the uneven demand."""
    rounds: int = CHECKPOINT_ROUNDS
    seed: int = 0
    run: Run = field(default_factory=Run)
