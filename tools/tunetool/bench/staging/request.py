"""What `bench staging` is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.bench import defaults
from tunetool.bench.defaults import STAGING_ROUNDS
from tunetool.bench.staging.published import SCENARIOS, Scenario
from tunetool.measure.session import Run
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
    run: Run = field(default_factory=Run)
