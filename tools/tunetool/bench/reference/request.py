"""The request of `bench reference`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.bench.defaults import CHECKPOINT_MODEL, MATRIX, STATE_BYTES
from tunetool.bench.staging.request import ROUNDS, SHM
from tunetool.measure.session import Run
from tunetool.node.units import parse_size
from tunetool.training.settings import Cluster, Material, Settings

KIND = "bench.reference"
VERIFY = "verify"
PARTS = (VERIFY, "checkpoint", "staging", "strategies")
"""The parts in their order: verify first, since benchmarks mean nothing on faulty storage."""


@dataclass(frozen=True)
class Request:
    """The options of the call. ``target``: directory on every node for checkpoints, model and data."""

    material: Material
    target: Path
    verify_target: Path | None = None
    """Target of ``verify``; None: the manifest's mount point."""
    expect: Mapping[str, float] = field(default_factory=dict)
    duration: float = 4.0
    """Seconds of one sample of ``verify``."""
    cluster: Cluster = field(default_factory=Cluster)
    settings: Settings = field(default_factory=Settings)
    memory: Path = SHM
    rounds: int = ROUNDS
    checkpoint_model: str = CHECKPOINT_MODEL
    state_bytes: int | None = parse_size(STATE_BYTES)
    matrix: str = MATRIX
    skip: Sequence[str] = ()
    """Parts that are left out."""
    anyway: bool = False
    """Go on after a FAIL of ``verify``."""
    run: Run = field(default_factory=Run)
