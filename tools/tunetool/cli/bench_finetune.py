"""``tunetool bench finetune``: its options, and the call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from tunetool.bench.defaults import PRESETS
from tunetool.cli import training_options
from tunetool.cli.output import finish
from tunetool.cli.training_options import TrainingOptions
from tunetool.errors import UsageProblem
from tunetool.fleet.options import HostsCommand
from tunetool.options.fields import option, takes
from tunetool.options.values import DIRECTORY, Value, parse_duration

_CURVES: Any = Value("time", lambda name, text: "off" if text == "off" else parse_duration(text))


@dataclass(frozen=True)
class Options(TrainingOptions):
    """What the call says."""

    preset: str | None = option(
        "--preset", type=click.Choice(list(PRESETS)), help="Set of values for options that are not given; see above."
    )
    trainer: str = option(
        "--trainer",
        type=click.Choice(["deepspeed", "lightning", "llamafactory"]),
        default="deepspeed",
        help="Training loop. deepspeed: tunetool's own loop on DeepSpeed.",
    )
    zero: int = training_options.zero()
    lora_rank: int = training_options.lora_rank()
    full: bool = training_options.full()
    learning_rate: float = option(
        "--learning-rate", type=float, default=1e-4, help="Highest learning rate of the schedule."
    )
    loader: str = training_options.loader()
    workers: int = training_options.workers()
    cold: bool = option("--cold", is_flag=True, help="Drop model and images from each node's page cache first.")
    checkpoint: Path | None = option("--checkpoint", type=DIRECTORY, help="New directory for a checkpoint at the end.")
    curves: float | str = option(
        "--curves", type=_CURVES, default="1s", help="Time between two samples of the curves; `off`: no curves."
    )
    prepare: bool = option(
        "--prepare", is_flag=True, help="Only make model and images, or check that they are complete."
    )


@click.command("finetune", cls=HostsCommand)
@takes(Options)
def finetune(given: Options) -> int:
    """Fine-tune Qwen2.5-VL, and report where the time goes: start, model load, data, steps.

    Makes model and images below --target if they are missing. Preset qwen2.5-vl-7b-lora: --model 7b --images 2000
    --epochs 10 --micro-batch 2. Only the training is judged: that every rank makes the same steps, and that every loss
    is a number. Writes a record, curves and a page of plots into the runs directory.

    Exit codes: 0 it trained; 1 a loss is not a number, or ranks made different steps; 2 the call was wrong; 3 it could
    not run, the loss does not fall, or with --cold the drives do not prove that they were read.
    """
    from tunetool.bench.finetune.request import Request
    from tunetool.bench.finetune.run import bench
    from tunetool.cli.under_python import go_on_under
    from tunetool.report.progress import best_progress
    from tunetool.training_python import DEEPSPEED, TORCH

    chosen: dict[str, Any] = dict(PRESETS[given.preset]) if given.preset is not None else {}
    images = None if given.dataset is not None else chosen.get("images")
    settings = replace(
        given.settings(chosen.get("epochs", 1), chosen.get("batch_size")),
        trainer=given.trainer,  # type: ignore[arg-type]  # click holds it to the choices
        zero_stage=given.zero,
        learning_rate=given.learning_rate,
        lora_rank=given.lora_rank,
        full=given.full,
        loader=given.loader,  # type: ignore[arg-type]  # click holds it to the choices
        cold=given.cold,
        checkpoint=given.checkpoint.absolute() if given.checkpoint is not None else None,
        curves=given.curves if isinstance(given.curves, float) else None,
        workers=given.workers,
    )
    if given.steps is not None and given.epochs is not None:
        raise UsageProblem("`--steps` and `--epochs` contradict each other", "leave out one of them")
    request = Request(
        material=given.material(chosen.get("model"), images),
        cluster=given.cluster(),
        settings=settings,
        prepare_only=given.prepare,
        run=given.run,
    )
    if given.inventory is None:
        only_looks = given.prepare or given.dry_run
        needs = () if only_looks else DEEPSPEED if given.trainer == "deepspeed" else TORCH
        go_on_under(given.python, needs)
    return finish(bench(request, best_progress()), given.json_to)
