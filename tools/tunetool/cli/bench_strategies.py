"""``tunetool bench strategies``: read the call, run, print."""

from __future__ import annotations

import sys

import click

from tunetool.cli.finetune_options import Options, finetune_options
from tunetool.errors import UsageProblem

_MATRIX = "1x1:z2,1x8:z2,2x8:z2,2x8:z3,1x8:z3"


@click.command("strategies")
@finetune_options
@click.option(
    "--matrix",
    default=_MATRIX,
    show_default=True,
    metavar="CELL,...",
    help="NODESxGPUS:zSTAGE, scaled to what there is.",
)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=2, show_default=True, help="Each cell once in each, interleaved."
)
@click.option("--lora-rank", type=click.IntRange(min=1), default=8, show_default=True, help="Of LoRA's factors.")
@click.option("--full", is_flag=True, help="Train all parameters, without LoRA.")
@click.option(
    "--network-time",
    default="12s",
    show_default=True,
    metavar="TIME",
    help="For the collectives of each layout, about.",
)
def strategies(options: Options, matrix: str, rounds: int, lora_rank: int, full: bool, network_time: str) -> int:
    """Which ZeRO stage on how many GPUs and nodes: the network measured, each step predicted, run, and compared.

    The network between the ranks of each layout is measured first; the bytes that each strategy must move in a step
    follow from the model. Each cell is predicted before it is run. That every cell trains is judged, and that stages
    compute the same; no speed is. Exit codes: 0 all ran; 1 a loss was no number, or other than the other stage's; 2 the
    call was wrong; 3 a cell could not be run.
    """
    from tunetool.bench.strategies.matrix import parse
    from tunetool.bench.strategies.request import STEPS, Request
    from tunetool.bench.strategies.run import bench
    from tunetool.cli.verify import parse_duration, write_json
    from tunetool.report.page import table_console
    from tunetool.report.progress import best_progress
    from tunetool.report.strategies import print_strategies
    from tunetool.report.strategies_page import REPORT, write_page
    from tunetool.training.settings import BATCH_SIZE, Settings

    if options.epochs is not None:
        raise UsageProblem("`--epochs` has no meaning here", f"a few steps tell: `--steps`, by default {STEPS}")
    request = Request(
        material=options.material(),
        matrix=parse(matrix),
        cluster=options.cluster(),
        settings=Settings(
            steps=options.steps or STEPS,
            batch_size=options.batch_size or BATCH_SIZE,
            lora_rank=lora_rank,
            full=full,
            curves=None,
        ),
        rounds=rounds,
        network_seconds=parse_duration(network_time),
        runs_dir=options.runs(),
        allow_busy=options.allow_busy,
        dry_run=options.dry_run,
        command=sys.argv,
    )
    result = bench(request, best_progress())
    if result.record is not None and result.path is not None:
        write_json(result.record, options.json_to)
        page = write_page(result.record, result.path.parent / REPORT)
        if options.json_to != "-":
            print_strategies(result.record, result.path, table_console())
        if page is not None:
            click.echo(f"plots: {page}", err=True)
    return int(result.code)
