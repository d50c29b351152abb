"""``tunetool bench staging``: read the call, run, print."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tunetool.cli.finetune_options import Options, finetune_options


@click.command("staging")
@click.option("--memory", default="/dev/shm", show_default=True, metavar="DIR", help="Where path A is staged to.")
@click.option(
    "--scenarios",
    default="single,node,nodes",
    show_default=True,
    metavar="NAME,...",
    help="One GPU, one node with all of its GPUs, all nodes; what there is not is left out, with the reason.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Both paths once in each.")
@click.option("--zero", type=click.IntRange(0, 3), default=2, show_default=True, help="ZeRO stage.")
@click.option(
    "--loader",
    type=click.Choice(["parallel", "transformers"]),
    default="parallel",
    show_default=True,
    help="How ranks read the model: by parallel reads, or as from_pretrained does.",
)
@click.option(
    "--workers", type=click.IntRange(min=0), default=2, show_default=True, help="Loading processes of each rank."
)
@finetune_options
def staging(options: Options, memory: str, scenarios: str, rounds: int, zero: int, loader: str, workers: int) -> int:
    """The reference fine-tune with its files in memory and on bulk storage: where should they live?

    Path A stages model and data to --memory and reads them there, path B reads them at --target; same seed and
    steps, cold caches before each, in an order drawn anew for each round. Staging counts for path A's end-to-end
    time. Equal losses alone are judged. Exit codes: 0 measured, losses equal; 1 the two paths trained something
    else; 2 the call was wrong, or memory is too small; 3 a run failed, or the cache was not cold.
    """
    from tunetool.bench.staging.request import Request
    from tunetool.bench.staging.run import bench
    from tunetool.bench.staging.scenarios import parse
    from tunetool.cli.verify import no_empty_paths, write_json
    from tunetool.report.progress import best_progress
    from tunetool.report.staging import print_staging
    from tunetool.report.staging_page import REPORT, write_page
    from tunetool.report.table import table_console
    from tunetool.training.settings import Settings

    no_empty_paths({"--memory": memory})
    request = Request(
        material=options.material(),
        cluster=options.cluster(),
        settings=Settings(
            zero_stage=zero,
            epochs=options.epochs or 1,
            steps=options.steps,
            batch_size=options.batch_size or 2,
            loader=loader,  # type: ignore[arg-type]
            workers=workers,
        ),
        memory=Path(memory),
        scenarios=parse(scenarios),
        rounds=rounds,
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
            print_staging(result.record, result.path, table_console())
        if page is not None:
            click.echo(f"plots: {page}", err=True)
    return int(result.code)
