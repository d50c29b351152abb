"""The settings of a fine-tune: model and data, ranks, and training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tunetool.errors import UsageProblem
from tunetool.training.workload import Device, Loader, Trainer, Workload

IMAGES = 200


BATCH_SIZE = 2


@dataclass(frozen=True)
class Cluster:
    """The settings that decide where the ranks run."""

    launcher: str = "auto"
    inventory: Path | None = None
    limit: str | None = None
    slurm: Sequence[str] = ()
    """``KEY=VALUE`` options for Slurm's batch script."""
    python: str | None = None
    """The interpreter on the hosts; None: the default of ``launch.job.Job``."""
    ranks_per_node: int | None = None
    """None: one per GPU of a node, or one on a node without GPUs."""
    device: Device = "auto"


@dataclass(frozen=True)
class Material:
    """The model and the data of the training."""

    model: str
    """7b, 3b, tiny, or a directory on the nodes."""
    dataset: Path | None = None
    """A directory on the nodes; None: synthetic pictures."""
    images: int = IMAGES
    target: Path | None = None
    """Directory for a model or dataset that must be made; None where neither must."""
    seed: int = 0

    def __post_init__(self) -> None:
        from tunetool.training.model.reference_model import SIZES

        made = ["the model"] * (self.model in SIZES) + ["pictures"] * (self.dataset is None)
        if made and self.target is None:
            raise UsageProblem(
                f"{' and '.join(made)} must be made, but there is no `--target`",
                "give `--target DIR` on the storage to measure; `--model DIR --dataset DIR` need none",
            )


@dataclass(frozen=True)
class Settings:
    """The settings of the training; the fields are those of ``Workload``."""

    trainer: Trainer = "deepspeed"
    zero_stage: int = 2
    epochs: int = 1
    steps: int | None = None
    batch_size: int = BATCH_SIZE
    learning_rate: float = 1e-4
    lora_rank: int = 8
    full: bool = False
    loader: Loader = "parallel"
    cold: bool = False
    checkpoint: Path | None = None
    curves: float | None = 1.0
    workers: int = 2

    def workload(self, model: str, dataset: str, device: Device, seed: int) -> Workload:
        """The workload for the ranks. Raises ``UsageProblem`` for an invalid setting."""
        return Workload(
            model=model,
            dataset=dataset,
            trainer=self.trainer,
            zero_stage=self.zero_stage,
            epochs=self.epochs,
            steps=self.steps,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            lora_rank=self.lora_rank,
            full=self.full,
            device=device,
            seed=seed,
            loader=self.loader,
            cold=self.cold,
            checkpoint=str(self.checkpoint) if self.checkpoint is not None else None,
            curves=self.curves,
            workers=self.workers,
        )
