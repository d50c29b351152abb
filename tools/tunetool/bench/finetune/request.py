"""What `bench finetune` is asked: its options, and the help text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunetool.bench.defaults import PRESETS
from tunetool.errors import UsageProblem
from tunetool.options.fields import option
from tunetool.options.values import DIRECTORY, Value, parse_duration
from tunetool.training import request as training
from tunetool.training.request import TrainingRequest
from tunetool.training_python import DEEPSPEED, TORCH

if TYPE_CHECKING:
    from tunetool.training.workload import Loader, Settings, Trainer

KIND = "bench.finetune"
FIGURES = {
    "s": (
        "rendezvous",
        "imports",
        "communicator",
        "model_load",
        "engine",
        "start",
        "first_batch",
        "checkpoint",
        "end_to_end",
        "data",
        "batch",
        "step",
    ),
    "B/s": ("model_bandwidth",),
    "1/s": ("tokens", "images"),
}
"""Figures of its records, by unit."""
NEEDS = DEEPSPEED
PREREQUISITES = ("DeepSpeed",)
USED_IN_PART = ("extra finetune", "extra lightning", "pdsh", "Slurm")
_CURVES: Any = Value("time", lambda name, text: "off" if text == "off" else parse_duration(text))


@dataclass(frozen=True)
class Request(TrainingRequest):
    """Fine-tune Qwen2.5-VL, and report where the time goes: start, model load, data, steps.

    Makes model and images below --target if they are missing. Preset qwen2.5-vl-7b-lora: --model 7b --images 2000
    --epochs 10 --micro-batch 2. Only the training is judged: that every rank makes the same steps, and that every loss
    is a number. Writes a record, curves and a page of plots into the runs directory.

    Exit codes: 0 it trained; 1 a loss is not a number, or ranks made different steps; 2 the call was wrong; 3 it could
    not run, the loss does not fall, or with --cold the drives do not prove that they were read.
    """

    preset: str | None = option(
        "--preset", type=click.Choice(list(PRESETS)), help="Set of values for options that are not given; see above."
    )
    trainer: Trainer = option(
        "--trainer",
        type=click.Choice(["deepspeed", "lightning", "llamafactory"]),
        default="deepspeed",
        help="Training loop. deepspeed: tunetool's own loop on DeepSpeed.",
    )
    zero: int = training.zero()
    lora_rank: int = training.lora_rank()
    full: bool = training.full()
    learning_rate: float = option(
        "--learning-rate", type=float, default=1e-4, help="Highest learning rate of the schedule."
    )
    loader: Loader = training.loader()
    workers: int = training.workers()
    cold: bool = option("--cold", is_flag=True, help="Drop model and images from each node's page cache first.")
    checkpoint: Path | None = option("--checkpoint", type=DIRECTORY, help="New directory for a checkpoint at the end.")
    curves: float | str = option(
        "--curves", type=_CURVES, default="1s", help="Time between two samples of the curves; `off`: no curves."
    )
    prepare_only: bool = option(
        "--prepare", is_flag=True, help="Only make model and images, or check that they are complete."
    )

    def check(self) -> None:
        """Raises ``UsageProblem`` for options that contradict each other."""
        super().check()
        if self.steps is not None and self.epochs is not None:
            raise UsageProblem("`--steps` and `--epochs` contradict each other", "leave out one of them")
        _ = self.material

    @property
    def needs(self) -> Sequence[str] | None:
        """None of them where nothing is trained, and DeepSpeed for its trainer alone."""
        if self.inventory is not None:
            return None
        if self.prepare_only or self.dry_run:
            return ()
        return DEEPSPEED if self.trainer == "deepspeed" else TORCH

    @property
    def presets(self) -> Mapping[str, Any]:
        """Those of ``--preset``."""
        return PRESETS[self.preset] if self.preset is not None else {}

    @property
    def settings(self) -> Settings:
        """The training."""
        return replace(
            super().settings,
            trainer=self.trainer,
            zero_stage=self.zero,
            learning_rate=self.learning_rate,
            lora_rank=self.lora_rank,
            full=self.full,
            loader=self.loader,
            cold=self.cold,
            checkpoint=self.checkpoint.absolute() if self.checkpoint is not None else None,
            curves=self.curves if isinstance(self.curves, float) else None,
            workers=self.workers,
        )
