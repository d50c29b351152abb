"""What `bench staging` is asked: its options, and the help text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tunetool.bench.defaults import SHM, STAGING_ROUNDS
from tunetool.bench.staging.published import Scenario
from tunetool.bench.staging.scenarios import parse
from tunetool.options import shared as options
from tunetool.options.fields import option
from tunetool.options.shared import InRounds
from tunetool.options.values import Value
from tunetool.training import request as training
from tunetool.training.request import TrainingRequest
from tunetool.training_python import DEEPSPEED

if TYPE_CHECKING:
    from tunetool.training.workload import Loader, Settings

KIND = "bench.staging"
FIGURES = {
    "s": (
        "stage",
        "model_load",
        "data_per_batch",
        "data_wait_per_batch",
        "first_epoch",
        "later_epoch",
        "fine_tune",
        "first_step",
        "end_to_end",
        "rank_model_load",
    ),
    "B/s": ("stage_rate",),
    "1": ("batch_spread", "speedup"),
}
"""Figures of its records, by unit."""
NEEDS = DEEPSPEED
PREREQUISITES = ("DeepSpeed",)
USED_IN_PART = ("extra finetune", "pdsh", "Slurm")
_SCENARIOS: Any = Value("names", lambda name, text: tuple(parse(text)))


@dataclass(frozen=True)
class Request(TrainingRequest, InRounds):
    """Compare the reference fine-tune with its files in memory and on bulk storage.

    Path A copies model and data to --memory-target and reads them there; path B reads them at --target. Both have the
    same seed and steps and cold caches, in a random order in each round. The time of staging counts for path A.
    Only one thing is judged: that both paths have equal losses. Writes a record and a page of plots into the runs
    directory.

    Exit codes: 0 measured, and losses are equal; 1 losses differ; 2 the call was wrong, or memory is too small; 3 a run
    failed, or the cache was not cold.
    """

    THOROUGH_ROUNDS: ClassVar[int] = STAGING_ROUNDS
    memory: Path = options.memory_target("Directory in memory on each node, to which path A stages.", default=SHM)
    scenarios: tuple[Scenario, ...] = option(
        "--scenarios",
        type=_SCENARIOS,
        default=(),
        metavar="NAME,...",
        show_default="the largest that can run here; all with --thorough",
        help="Scenarios: single (one GPU), node (all GPUs of one node), nodes (all nodes). One that this machine "
        "cannot run is left out, with the reason.",
    )
    zero: int = training.zero()
    loader: Loader = training.loader()
    workers: int = training.workers()

    def check(self) -> None:
        """Raises ``UsageProblem`` for options that contradict each other."""
        super().check()
        _ = self.material

    @property
    def settings(self) -> Settings:
        """The training, on both paths."""
        return replace(super().settings, zero_stage=self.zero, loader=self.loader, workers=self.workers)
