"""``tunetool bench finetune``: read the call, run, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from tunetool.cli.finetune_options import Options, finetune_options
from tunetool.errors import UsageProblem

PRESETS = ("qwen2.5-vl-7b-lora",)


@click.command("finetune")
@finetune_options
@click.option("--preset", type=click.Choice(PRESETS), help="Its values, where others are not given: see above.")
@click.option(
    "--trainer",
    type=click.Choice(["deepspeed", "lightning", "llamafactory"]),
    default="deepspeed",
    show_default=True,
    help="deepspeed: tunetool's own loop on it.",
)
@click.option("--zero", type=click.IntRange(0, 3), default=2, show_default=True, help="ZeRO stage.")
@click.option("--lora-rank", type=click.IntRange(min=1), default=8, show_default=True, help="Of LoRA's factors.")
@click.option("--full", is_flag=True, help="Train all parameters, without LoRA.")
@click.option("--learning-rate", type=float, default=1e-4, show_default=True, help="The highest of the schedule.")
@click.option(
    "--loader",
    type=click.Choice(["parallel", "transformers"]),
    default="parallel",
    show_default=True,
    help="parallel: tunetool's reads straight to the device; transformers: its from_pretrained.",
)
@click.option(
    "--workers", type=click.IntRange(min=0), default=2, show_default=True, help="Loading processes of each rank."
)
@click.option("--cold", is_flag=True, help="Drop model and images from each node's page cache first.")
@click.option("--checkpoint", metavar="DIR", help="Save there at the end; it must not exist.")
@click.option("--curves", default="1s", show_default=True, metavar="TIME", help="Between two samples; `off`: none.")
@click.option("--prepare", is_flag=True, help="Only make model and images, or check that they are whole.")
def finetune(
    options: Options,
    preset: str | None,
    trainer: str,
    zero: int,
    lora_rank: int,
    full: bool,
    learning_rate: float,
    loader: str,
    workers: int,
    cold: bool,
    checkpoint: str | None,
    curves: str,
    prepare: bool,
) -> int:
    """Fine-tune Qwen2.5-VL, and say where the time goes: start, model load, data, steps.

    Model and images are made below --target where they are missing. Preset qwen2.5-vl-7b-lora: --model 7b --images 2000
    --epochs 10 --batch-size 2. That it trains is judged, no speed. Exit codes: 0 it trained; 1 a loss was no number;
    2 the call was wrong; 3 it could not run, or with --cold the drives did not prove that they were read.
    """
    from tunetool.bench.finetune.request import PRESETS, Request
    from tunetool.bench.finetune.run import bench
    from tunetool.cli.verify import no_empty_paths, write_json
    from tunetool.report.finetune import print_finetune
    from tunetool.report.finetune_page import write_page
    from tunetool.report.page import table_console
    from tunetool.report.progress import best_progress
    from tunetool.training.settings import BATCH_SIZE, Settings

    no_empty_paths({"--checkpoint": checkpoint})
    chosen: dict[str, Any] = dict(PRESETS[preset]) if preset is not None else {}
    images = None if options.dataset is not None else chosen.get("images")
    settings = Settings(
        trainer=trainer,  # type: ignore[arg-type]
        zero_stage=zero,
        epochs=options.epochs or chosen.get("epochs", 1),
        steps=options.steps,
        batch_size=options.batch_size or chosen.get("batch_size", BATCH_SIZE),
        learning_rate=learning_rate,
        lora_rank=lora_rank,
        full=full,
        loader=loader,  # type: ignore[arg-type]
        cold=cold,
        checkpoint=Path(checkpoint).absolute() if checkpoint is not None else None,
        curves=_interval(curves),
        workers=workers,
    )
    if options.steps is not None and options.epochs is not None:
        raise UsageProblem("`--steps` and `--epochs` both say how long", "leave out one of them")
    request = Request(
        material=options.material(chosen.get("model"), images),
        cluster=options.cluster(),
        settings=settings,
        runs_dir=options.runs(),
        allow_busy=options.allow_busy,
        prepare_only=prepare,
        dry_run=options.dry_run,
        command=sys.argv,
    )
    result = bench(request, best_progress())
    if result.record is not None and result.path is not None:
        write_json(result.record, options.json_to)
        page = write_page(result.record, result.path.parent)
        if options.json_to != "-":
            print_finetune(result.record, result.path, table_console())
        if page is not None:
            click.echo(f"plots: {page}", err=True)
    return int(result.code)


def _interval(text: str) -> float | None:
    from tunetool.cli.verify import parse_duration

    return None if text == "off" else parse_duration(text)
