"""The settings of a fine-tune: model and data, ranks, and training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tunetool.advise.precision import Asked
from tunetool.errors import UsageProblem
from tunetool.training.data.conversations import split_name
from tunetool.training.workload import BATCH_SIZE, Device, Training, Workload

__all__ = ["BATCH_SIZE", "IMAGES", "Cluster", "Material", "Settings"]

IMAGES = 200


@dataclass(frozen=True)
class Cluster:
    """The settings that decide where the ranks run."""

    launcher: str = "auto"
    inventory: Path | None = None
    limit: str | None = None
    ansible: Sequence[str] = ()
    """Further options for ansible-playbook, on the way to the hosts."""
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
    """A directory on the nodes, or ``DIR:NAME``; None: synthetic pictures."""
    images: int = IMAGES
    target: Path | None = None
    """Directory for a model or dataset that must be made; None where neither must."""
    seed: int = 0

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Material:
        """From JSON, in which a path is a text."""
        paths = {name: Path(document[name]) if document[name] is not None else None for name in ("dataset", "target")}
        return cls(**{**document, **paths})

    @property
    def folder(self) -> Path | None:
        """The dataset's directory."""
        return None if self.dataset is None else Path(split_name(str(self.dataset))[0])

    @property
    def entry(self) -> str | None:
        """The name of the dataset in its directory's list; None where none was given."""
        return None if self.dataset is None else split_name(str(self.dataset))[1]

    def __post_init__(self) -> None:
        from tunetool.training.model.reference_model import SIZES

        made = ["the model"] * (self.model in SIZES) + ["pictures"] * (self.dataset is None)
        if made and self.target is None:
            raise UsageProblem(
                f"{' and '.join(made)} must be made, but there is no `--target`",
                "give `--target DIR` on the storage to measure; `--model DIR --dataset DIR` need none",
            )


@dataclass(frozen=True)
class Settings(Training):
    """The settings of the training."""

    checkpoint: Path | None = None
    precision: Asked = "auto"

    def workload(self, model: str, dataset: str, device: Device, seed: int, entry: str | None = None) -> Workload:
        """The workload for the ranks. Raises ``UsageProblem`` for an invalid setting."""
        return Workload(
            model=model,
            dataset=dataset,
            entry=entry,
            device=device,
            precision=self.precision,
            seed=seed,
            checkpoint=str(self.checkpoint) if self.checkpoint is not None else None,
            **{each.name: getattr(self, each.name) for each in fields(Training)},
        )
