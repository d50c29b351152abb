"""What every benchmark around the fine-tune is asked: the model and the data, the ranks, the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunetool.errors import UsageProblem
from tunetool.fleet.options import OnHosts, need_inventory
from tunetool.options.fields import number, option, repeatable
from tunetool.options.shared import Measuring, device, model_files, precision, python, seed, target
from tunetool.options.values import DATASET
from tunetool.training_python import DEEPSPEED

if TYPE_CHECKING:
    from tunetool.advise.precision import Asked
    from tunetool.training.workload import Cluster, Device, Material, Settings

LAUNCHERS = ("auto", "local", "ssh", "deepspeed", "slurm")
LOADERS = ("parallel", "transformers")


def loader() -> Any:
    """``--loader`` of the model."""
    return option(
        "--loader",
        type=click.Choice(LOADERS),
        default="parallel",
        help="Reader of the model on each rank. parallel: parallel reads straight to the device; transformers: its "
        "from_pretrained.",
    )


def workers() -> Any:
    """``--workers`` of the data."""
    return number("--workers", least=0, default=2, help="Number of processes per rank that load data.")


def zero() -> Any:
    """``--zero``, the stage."""
    return option("--zero", type=click.IntRange(0, 3), default=2, metavar="STAGE", help="ZeRO stage.")


def lora_rank() -> Any:
    """``--lora-rank``."""
    return number("--lora-rank", default=8, help="Rank of LoRA.")


def full() -> Any:
    """``--full``."""
    return option("--full", is_flag=True, help="Train all parameters, without LoRA.")


@dataclass(frozen=True)
class TrainingRequest(Measuring, OnHosts):
    """The options as given. None: not given, so that ``presets`` and a benchmark's own defaults apply."""

    model: str | None = model_files("Qwen2.5-VL of that size with random weights, or a directory that holds one.")
    dataset: Path | None = option(
        "--dataset",
        type=DATASET,
        help="Dataset in LLaMA-Factory's format; NAME is its name in dataset_info.json, where several are there. "
        "Default: synthetic images.",
    )
    images: int | None = number("--images", help="Number of synthetic images. Default: 200.")
    target: Path | None = target("Directory on bulk storage: model and images are made there once and read from there.")
    launcher: str = option(
        "--launcher",
        type=click.Choice(LAUNCHERS),
        default="auto",
        help="Launcher of the ranks. auto: torchrun on this node, or over ssh with -i.",
    )
    slurm: tuple[str, ...] = repeatable(
        "--slurm", metavar="KEY=VALUE", help="With --launcher slurm: setting of the batch script. Repeatable."
    )
    python: str | None = python(hosts=True)
    ranks_per_node: int | None = number(
        "--ranks-per-node", help="Number of ranks on each node. Default: its number of GPUs, or 1."
    )
    device: Device = device("Device of the ranks. auto: GPUs if there are any, else the CPU.")
    precision: Asked = precision()
    steps: int | None = number("--steps", help="Number of steps, instead of --epochs.")
    epochs: int | None = number("--epochs", help="Number of passes over the data. Default: 1.")
    micro_batch: int | None = number("--micro-batch", help="Samples of one rank in one pass. Default: 2.")
    seed: int = seed("the model, the images and their order")

    def check(self) -> None:
        """Raises ``UsageProblem`` for options that contradict each other; reads no file."""
        if self.dataset is not None and self.images is not None:
            raise UsageProblem("`--images` makes images, and `--dataset` has its own", "leave out one of them")
        from tunetool.advise.precision import refuse_on_cpu

        refuse_on_cpu(self.precision, self.device)
        need_inventory(self.inventory, limit=self.limit)
        self._check_paths()
        # Passwords are asked for now.
        _ = self.cluster

    def _check_paths(self) -> None:
        if self.inventory is None:
            return
        from tunetool.advise.qwen2_5_vl import CONFIGURATIONS

        model = self.model if self.model not in CONFIGURATIONS else None
        for name, value in (("model", model), ("target", self.target), ("dataset", self.dataset)):
            if value is not None and not str(value).startswith("/"):
                raise UsageProblem(
                    f"`--{name} {value}` is not absolute", "on other hosts there is no current directory"
                )

    @property
    def needs(self) -> Sequence[str] | None:
        """Packages of the Python that it goes on under; None where it asks other hosts."""
        return DEEPSPEED if self.inventory is None else None

    @property
    def presets(self) -> Mapping[str, Any]:
        """Values of ``model``, ``images``, ``epochs`` and ``batch_size`` where the call has none."""
        return {}

    @cached_property
    def cluster(self) -> Cluster:
        """Where the ranks run. Raises ``UsageProblem`` for words that Ansible does not get."""
        from tunetool.training.workload import Cluster

        return Cluster(
            launcher=self.launcher,
            slurm=self.slurm,
            python=self.python,
            inventory=self.inventory,
            limit=self.limit,
            ansible=self.ansible_options(),
            ranks_per_node=self.ranks_per_node,
            device=self.device,
        )

    @property
    def material(self) -> Material:
        """The model and the data. Raises ``UsageProblem`` without a model, or without a place to make it."""
        from tunetool.training.workload import IMAGES, Material

        model = self.model or self.presets.get("model")
        if model is None:
            raise UsageProblem("nothing to train", "give `--model 7b|3b|tiny|PATH`")
        images = self.images or (self.presets.get("images") if self.dataset is None else None) or IMAGES
        return Material(model=model, dataset=self.dataset, images=images, target=self.target, seed=self.seed)

    @property
    def settings(self) -> Settings:
        """The training. A benchmark replaces what it has options for."""
        from tunetool.training.workload import BATCH_SIZE, Settings

        return Settings(
            epochs=self.epochs or self.presets.get("epochs", 1),
            steps=self.steps,
            batch_size=self.micro_batch or self.presets.get("batch_size", BATCH_SIZE),
            precision=self.precision,
        )
