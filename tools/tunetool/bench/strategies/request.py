"""The request of `bench strategies`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tunetool.bench.defaults import NETWORK_SECONDS, STRATEGIES_ROUNDS, STRATEGIES_STEPS
from tunetool.bench.strategies.matrix import Cell
from tunetool.errors import UsageProblem
from tunetool.measure.session import Run
from tunetool.training.settings import Settings, TrainingRequest

KIND = "bench.strategies"
STEPS, ROUNDS = STRATEGIES_STEPS, STRATEGIES_ROUNDS
WARM_UP = 2
"""Steps that are left out: the first makes buffers, and in the first two stage 3 learns the order of the modules."""


@dataclass(frozen=True)
class Request(TrainingRequest):
    """The options of the call."""

    matrix: Sequence[Cell] = field(kw_only=True)
    settings: Settings = field(default_factory=lambda: Settings(steps=STEPS))
    rounds: int = ROUNDS
    network_seconds: float = float(NETWORK_SECONDS)
    """Seconds for the collectives of one layout."""
    run: Run = field(default_factory=Run)

    def __post_init__(self) -> None:
        if self.settings.steps is None or self.settings.steps <= WARM_UP:
            raise UsageProblem(
                f"`--steps {self.settings.steps}` leaves none to measure",
                f"the first {WARM_UP} are left out: ask for {WARM_UP + 1} or more",
            )
