"""The request of `bench reference`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.bench.defaults import CHECKPOINT_MODEL, MATRIX, STATE_BYTES
from tunetool.bench.staging.request import ROUNDS, SHM
from tunetool.errors import UsageProblem
from tunetool.measure.session import Run
from tunetool.node.units import parse_size
from tunetool.training.settings import Cluster, Material, Settings

KIND = "bench.reference"
VERIFY = "verify"
PARTS = (VERIFY, "checkpoint", "staging", "strategies")
"""The parts in their order: verify first, since benchmarks mean nothing on faulty storage."""
MAIN_STATE_BYTES = parse_size(STATE_BYTES)


@dataclass(frozen=True, kw_only=True)
class Common:
    """The options that do not depend on the nodes."""

    expect: Mapping[str, float] = field(default_factory=dict)
    duration: float = 4.0
    """Seconds of one sample of ``verify``."""
    settings: Settings = field(default_factory=Settings)
    memory: Path = SHM
    rounds: int = ROUNDS
    skip: Sequence[str] = ()
    """Parts to leave out."""
    anyway: bool = False
    """Continue after a FAIL of ``verify``."""
    all_or_nothing: bool = False
    """Stop instead of leaving a node out."""
    run: Run = field(default_factory=Run)


@dataclass(frozen=True)
class Asked(Common):
    """The options of the call; None: chosen by the nodes' capacities."""

    model: str | None = None
    dataset: Path | None = None
    images: int | None = None
    target: Path | None = None
    seed: int = 0
    cluster: Cluster = field(default_factory=Cluster)
    checkpoint_model: str | None = None
    state_bytes: int | None = None
    matrix: str | None = None

    @property
    def parts(self) -> list[str]:
        """The parts to run. Raises ``UsageProblem``."""
        return parts_without(self.skip)


@dataclass(frozen=True)
class Request(Common):
    """The complete options. ``target``: directory on every node for checkpoints, model and data."""

    material: Material
    target: Path
    verify_target: Path | None = None
    """Target of ``verify``; None: the manifest's mount point."""
    cluster: Cluster = field(default_factory=Cluster)
    checkpoint_model: str = CHECKPOINT_MODEL
    state_bytes: int | None = MAIN_STATE_BYTES
    matrix: str = MATRIX


def parts_without(skip: Sequence[str]) -> list[str]:
    """The parts that remain. Raises ``UsageProblem`` for an unknown name, or if none remains."""
    for name in skip:
        if name not in PARTS:
            raise UsageProblem(f"`--skip {name}` is not a part", f"the parts are {', '.join(PARTS)}")
    chosen = [name for name in PARTS if name not in skip]
    if not chosen:
        raise UsageProblem("`--skip` leaves nothing", f"the parts are {', '.join(PARTS)}")
    return chosen
