"""What `bench staging` is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.bench import defaults
from tunetool.bench.defaults import STAGING_ROUNDS
from tunetool.bench.staging.published import SCENARIOS, Scenario
from tunetool.errors import ExitCode
from tunetool.record import Record
from tunetool.training.settings import Cluster, Material, Settings

KIND = "bench.staging"
ROUNDS = STAGING_ROUNDS
SHM = Path(defaults.SHM)


@dataclass(frozen=True)
class Request:
    """What the caller asked for. ``material`` lies on bulk storage, ``memory`` is where it is staged."""

    material: Material
    cluster: Cluster = field(default_factory=Cluster)
    settings: Settings = field(default_factory=Settings)
    memory: Path = SHM
    scenarios: Sequence[Scenario] = SCENARIOS
    rounds: int = ROUNDS
    runs_dir: Path | None = None
    allow_busy: bool = False
    dry_run: bool = False
    command: Sequence[str] = ()


@dataclass(frozen=True)
class Result:
    """The record, where it lies, and what the process ends with. No record for a dry run."""

    record: Record | None
    path: Path | None
    code: ExitCode
