"""What a fine-tune is asked: which model and data, on which ranks, with which settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.bench.finetune.workload import Device, Loader, Trainer, Workload
from tunetool.errors import ExitCode, UsageProblem
from tunetool.record import Record

KIND = "bench.finetune"
IMAGES = 200
BATCH_SIZE = 2
PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Qwen2.5-VL-7B with LoRA on 2,000 images: 10 epochs, batches of 2.
    "qwen2.5-vl-7b-lora": {"model": "7b", "images": 2000, "epochs": 10, "batch_size": 2},
}


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
        from tunetool.bench.finetune.models import SIZES

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


@dataclass(frozen=True)
class Request:
    """All of it."""

    material: Material
    cluster: Cluster = field(default_factory=Cluster)
    settings: Settings = field(default_factory=Settings)
    runs_dir: Path | None = None
    allow_busy: bool = False
    prepare_only: bool = False
    dry_run: bool = False
    command: Sequence[str] = ()


@dataclass(frozen=True)
class Result:
    """The record, where it lies, and what the process ends with. No record for a dry run, nor for `--prepare`."""

    record: Record | None
    path: Path | None
    code: ExitCode
