"""What `bench strategies` is asked: its options, and the help text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from tunetool.bench.defaults import MATRIX, NETWORK_SECONDS, STRATEGIES_ROUNDS, STRATEGIES_STEPS
from tunetool.bench.strategies.matrix import Cell, parse
from tunetool.errors import UsageProblem
from tunetool.measure.pace import Pace
from tunetool.options import shared as options
from tunetool.options.fields import option
from tunetool.options.shared import InRounds
from tunetool.options.values import DURATION, Value
from tunetool.training import request as training
from tunetool.training.request import TrainingRequest
from tunetool.training_python import DEEPSPEED

if TYPE_CHECKING:
    from tunetool.training.workload import Settings

KIND = "bench.strategies"
FIGURES = {
    "s": ("work", "hooks_per_use", "hooks_per_gather", "latency", "queued", "communicator", "step", "data", "start"),
    "B/s": ("algorithm_bandwidth", "bus_bandwidth"),
    "1": ("prediction_error", "versus_alone", "versus_zero2", "efficiency"),
}
"""Figures of its records, by unit."""
NEEDS = DEEPSPEED
PREREQUISITES = ("DeepSpeed",)
USED_IN_PART = ("extra finetune", "pdsh", "Slurm")
STEPS = STRATEGIES_STEPS
WARM_UP = 2
"""Steps that are left out: the first makes buffers, and in the first two stage 3 learns the order of the modules."""
_CELLS: Any = Value("cells", lambda name, text: tuple(parse(text)))


@dataclass(frozen=True)
class Request(TrainingRequest, InRounds):
    """Compare ZeRO stages on different numbers of GPUs and nodes, each with its predicted time of a step.

    Measures the network between the ranks of each layout first, computes from the model which bytes each strategy must
    move in a step, and predicts each cell before it runs. Two things are judged: that every cell trains, and that the
    stages compute the same. Writes a record and a page of plots into the runs directory.

    Exit codes: 0 all cells ran; 1 a loss is not a number, or differs from another stage's; 2 the call was wrong; 3 a
    cell could not run.
    """

    THOROUGH_ROUNDS: ClassVar[int] = STRATEGIES_ROUNDS
    matrix: tuple[Cell, ...] = options.matrix(MATRIX, type=_CELLS)
    lora_rank: int = training.lora_rank()
    full: bool = training.full()
    network_seconds: float = option(
        "--network-time",
        type=DURATION,
        default=f"{NETWORK_SECONDS}s",
        help="Approximate time for measuring the network of each layout.",
    )

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps <= WARM_UP:
            raise UsageProblem(
                f"`--steps {self.steps}` leaves none to measure",
                f"the first {WARM_UP} are left out: ask for {WARM_UP + 1} or more",
            )

    def check(self) -> None:
        """Raises ``UsageProblem`` for options that contradict each other, or have no meaning here."""
        if self.epochs is not None:
            raise UsageProblem("`--epochs` has no meaning here", f"use `--steps`; a few are enough (default: {STEPS})")
        super().check()
        _ = self.material

    @property
    def pace(self) -> Pace:
        """No further rounds: nothing is compared that they could decide."""
        asked = super().pace
        return Pace(asked.fewest, asked.budget)

    @property
    def needs(self) -> Sequence[str] | None:
        """None of them where nothing is trained."""
        return () if self.dry_run and self.inventory is None else super().needs

    @property
    def settings(self) -> Settings:
        """The training; each cell has its own stage."""
        return replace(
            super().settings, steps=self.steps or STEPS, lora_rank=self.lora_rank, full=self.full, curves=None
        )
