"""Options that every command around the fine-tune has, spelt and meant alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunetool.errors import UsageProblem

if TYPE_CHECKING:
    from tunetool.training.settings import Cluster, Material

LAUNCHERS = ("auto", "local", "ssh", "deepspeed", "slurm")


@dataclass(frozen=True)
class Options:
    """As they were given; None where not, for a command's own defaults and presets."""

    model: str | None
    dataset: str | None
    images: int | None
    target: str | None
    inventory: str | None
    limit: str | None
    launcher: str
    slurm: tuple[str, ...]
    python: str | None
    ranks_per_node: int | None
    device: str
    steps: int | None
    epochs: int | None
    batch_size: int | None
    seed: int
    json_to: str | None
    runs_dir: str | None
    allow_busy: bool
    dry_run: bool

    def check(self) -> None:
        """Raises ``UsageProblem`` for what cannot be meant, before anything is looked at."""
        from tunetool.cli.verify import check_json, no_empty_paths

        paths = {"--model": self.model, "--dataset": self.dataset, "--target": self.target, "--json": self.json_to}
        no_empty_paths({**paths, "--runs-dir": self.runs_dir, "-i": self.inventory, "--python": self.python})
        check_json(self.json_to)
        if self.dataset is not None and self.images is not None:
            raise UsageProblem(
                "`--images` says how many are made, and `--dataset` has its own", "leave out one of them"
            )
        if self.inventory is None:
            if self.limit is not None:
                raise UsageProblem("`--limit` needs an inventory", "add `-i INVENTORY`")
            return
        from tunetool.training.model.reference_model import SIZES

        for name in ("model", "target", "dataset"):
            value = getattr(self, name) if getattr(self, name) not in SIZES else None
            if value is not None and not value.startswith("/"):
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
            inventory=Path(self.inventory) if self.inventory is not None else None,
            limit=self.limit,
            ranks_per_node=self.ranks_per_node,
            device=self.device,  # type: ignore[arg-type]
        )

    def material(self, model: str | None = None, images: int | None = None) -> Material:
        """What is trained, and on what; ``model`` and ``images`` where none were given. Raises ``UsageProblem``."""
        from tunetool.training.settings import IMAGES, Material

        chosen = self.model or model
        if chosen is None:
            raise UsageProblem("nothing to train", "give `--model 7b|3b|tiny|DIR`")
        return Material(
            model=chosen,
            dataset=Path(self.dataset) if self.dataset is not None else None,
            images=self.images or images or IMAGES,
            target=Path(self.target) if self.target is not None else None,
            seed=self.seed,
        )

    def runs(self) -> Path | None:
        """Where records are kept, where that was said."""
        return Path(self.runs_dir) if self.runs_dir is not None else None


_OPTIONS = (
    click.option(
        "--model", metavar="7b|3b|tiny|DIR", help="Qwen2.5-VL of that size, built at random; or a checkpoint."
    ),
    click.option("--dataset", metavar="DIR", help="As LLaMA-Factory has it. Default: synthetic images with answers."),
    click.option("--images", type=click.IntRange(min=1), metavar="N", help="So many synthetic ones. Default: 200."),
    click.option("--target", metavar="DIR", help="Where model and images are made, and found again: bulk storage."),
    click.option("-i", "--inventory", metavar="INVENTORY", help="On every host of an Ansible inventory."),
    click.option("--limit", metavar="PATTERN", help="With -i: only these hosts."),
    click.option(
        "--launcher",
        type=click.Choice(LAUNCHERS),
        default="auto",
        show_default=True,
        help="What starts the ranks. auto: torchrun here, or over ssh with -i.",
    ),
    click.option(
        "--slurm",
        multiple=True,
        metavar="KEY=VALUE",
        help="For --launcher slurm: into its batch script. Again for more.",
    ),
    click.option(
        "--python",
        metavar="PATH",
        help="The ranks' Python, with tunetool and torch. Default: this one; with -i, /opt/tunetool/bin/python.",
    ),
    click.option(
        "--ranks-per-node", type=click.IntRange(min=1), metavar="N", help="Default: as many as there are GPUs, or 1."
    ),
    click.option(
        "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="For the ranks."
    ),
    click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Exactly so many, instead of epochs."),
    click.option("--epochs", type=click.IntRange(min=1), metavar="N", help="Default: 1."),
    click.option("--batch-size", type=click.IntRange(min=1), metavar="N", help="Of one rank. Default: 2."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of model, images and their order."),
    click.option("--json", "json_to", metavar="FILE|-", help="Also write the record to FILE; `-`: it alone on stdout."),
    click.option("--runs-dir", metavar="DIR", help="Where records are kept, each with its curves."),
    click.option("--allow-busy", is_flag=True, help="Measure beside a job that uses the drives or GPUs."),
    click.option("--dry-run", is_flag=True, help="Say what would be made and run, and where; do nothing."),
)


def finetune_options(function: Callable[..., int]) -> Callable[..., int]:
    """Hands ``Options`` to a command as its first argument; its own options come as usual."""

    @functools.wraps(function)
    def called(**values: Any) -> int:
        options = Options(**{each.name: values.pop(each.name) for each in fields(Options)})
        options.check()
        return function(options, **values)

    for option in reversed(_OPTIONS):
        called = option(called)
    return called
