"""What a fine-tune is asked: which model and data, on which ranks, with which settings."""

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
    """Where the ranks run."""

    launcher: str = "auto"
    inventory: Path | None = None
    limit: str | None = None
    slurm: Sequence[str] = ()
    """Each ``KEY=VALUE`` for its batch script."""
    python: str | None = None
    """The interpreter on the hosts; None: as ``launch.job.Job`` says."""
    ranks_per_node: int | None = None
    """None: as many as a node has GPUs, one without any."""
    device: Device = "auto"


@dataclass(frozen=True)
class Material:
    """What is trained, and on what."""

    model: str
    """7b, 3b, tiny, or a directory on the nodes."""
    dataset: Path | None = None
    """A directory on the nodes; None: synthetic pictures."""
    images: int = IMAGES
    target: Path | None = None
    """Where what is made lies; None where nothing has to be made."""
    seed: int = 0

    def __post_init__(self) -> None:
        from tunetool.training.model.reference_model import SIZES

        made = ["the model"] * (self.model in SIZES) + ["pictures"] * (self.dataset is None)
        if made and self.target is None:
            raise UsageProblem(
                f"{' and '.join(made)} must be made somewhere",
                "give `--target DIR` on the storage that is to be read; `--model DIR --dataset DIR` need none",
            )


@dataclass(frozen=True)
class Settings:
    """Of the training; as in ``Workload``."""

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
        """What the ranks are told. Raises ``UsageProblem``."""
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
