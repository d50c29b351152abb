"""Options that every command around the fine-tune shares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunetool.errors import UsageProblem
from tunetool.fleet.options import OnHosts, need_inventory
from tunetool.options.fields import number, option, repeatable
from tunetool.options.shared import Measuring, device, model_files, precision, python, seed, target
from tunetool.options.values import DATASET

if TYPE_CHECKING:
    from tunetool.advise.precision import Asked
    from tunetool.training.settings import Cluster, Material, Settings

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
class TrainingOptions(Measuring, OnHosts):
    """The options as given. None: not given, so that a command's own defaults and presets apply."""

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
    device: str = device("Device of the ranks. auto: GPUs if there are any, else the CPU.")
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
        if self.inventory is None:
            return
        from tunetool.advise.qwen2_5_vl import CONFIGURATIONS

        model = self.model if self.model not in CONFIGURATIONS else None
        for name, value in (("model", model), ("target", self.target), ("dataset", self.dataset)):
            if value is not None and not str(value).startswith("/"):
                raise UsageProblem(
                    f"`--{name} {value}` is not absolute", "on other hosts there is no current directory"
                )

    def cluster(self) -> Cluster:
        """Where the ranks run."""
        from tunetool.training.settings import Cluster

        return Cluster(
            launcher=self.launcher,
            slurm=self.slurm,
            python=self.python,
            inventory=self.inventory,
            limit=self.limit,
            ansible=self.ansible_options(),
            ranks_per_node=self.ranks_per_node,
            device=self.device,  # type: ignore[arg-type]  # click holds it to the choices
        )

    def material(self, model: str | None = None, images: int | None = None) -> Material:
        """The model and the data; ``model`` and ``images`` are defaults. Raises ``UsageProblem`` without a model."""
        from tunetool.training.settings import IMAGES, Material

        chosen = self.model or model
        if chosen is None:
            raise UsageProblem("nothing to train", "give `--model 7b|3b|tiny|PATH`")
        return Material(
            model=chosen,
            dataset=self.dataset,
            images=self.images or images or IMAGES,
            target=self.target,
            seed=self.seed,
        )

    def settings(self, epochs: int = 1, batch_size: int | None = None) -> Settings:
        """The training; ``epochs`` and ``batch_size`` are defaults. A command replaces what it has options for."""
        from tunetool.training.settings import BATCH_SIZE, Settings

        return Settings(
            epochs=self.epochs or epochs,
            steps=self.steps,
            batch_size=self.micro_batch or batch_size or BATCH_SIZE,
            precision=self.precision,
        )
