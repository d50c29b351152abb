"""The request of `bench staging`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.bench import defaults
from tunetool.bench.defaults import STAGING_ROUNDS
from tunetool.bench.staging.published import SCENARIOS, Scenario
from tunetool.measure.session import Run
from tunetool.training.settings import TrainingRequest

KIND = "bench.staging"
ROUNDS = STAGING_ROUNDS
SHM = Path(defaults.SHM)


@dataclass(frozen=True)
class Request(TrainingRequest):
    """The options of the call. ``material`` is on bulk storage; ``memory``: the directory to which it is staged."""

    memory: Path = SHM
    scenarios: Sequence[Scenario] = SCENARIOS
    rounds: int = ROUNDS
    run: Run = field(default_factory=Run)
