"""``tunetool bench checkpoint``: read the call, run, print."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tunetool.errors import UsageProblem


@click.command("checkpoint")
@click.option("--target", metavar="DIR", help="A directory on the drives; what is written there is removed afterwards.")
@click.option(
    "--memory-target",
    metavar="DIR",
    help="A directory in memory, such as /dev/shm: a stand-in for a medium of that speed, and marked as such.",
)
@click.option("--model", required=True, metavar="NAME|PATH", help="phi3-mini, 7b, 13b, 70b-shard, or a config.json.")
@click.option("--state-bytes", metavar="SIZE", help="Drop whole layers until the state is so large, such as `2GB`.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="What holds the state. auto: the GPU, where torch sees one.",
)
@click.option(
    "--ranks", type=click.IntRange(min=1), default=1, show_default=True, help="Processes that share the state."
)
@click.option("--engines", default="*", show_default=True, metavar="GLOB,...", help="Only those whose names match.")
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=6,
    show_default=True,
    help="Each engine once in each. Fewer than 6 cannot reach 95 % confidence.",
)
@click.option(
    "--budget", metavar="TIME", help="No round begins that would end later than, say, `10m`; the first is cut."
)
@click.option("--against-fio", is_flag=True, help="Also fio in every round, by the number of files that is best here.")
@click.option("--train", is_flag=True, help="Also a small training loop with each engine: time lost per checkpoint.")
@click.option("--steps", type=click.IntRange(min=2), default=24, show_default=True, help="Of that loop.")
@click.option("--sharded-every", type=click.IntRange(min=0), default=6, show_default=True, help="Steps; 0: never.")
@click.option(
    "--consolidated-every",
    type=click.IntRange(min=0),
    default=12,
    show_default=True,
    help="Steps, for engines that gather the whole state on one rank; 0: never.",
)
@click.option("--json", "json_to", metavar="FILE|-", help="Also write the record to FILE; `-`: it alone on stdout.")
@click.option("--runs-dir", metavar="DIR", help="Where records are kept, each with its plots.")
@click.option("--allow-busy", is_flag=True, help="Measure beside a job that uses the drives or GPUs.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order of engines, and of the state.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, how long and where; do nothing.")
def checkpoint(
    target: str | None,
    memory_target: str | None,
    model: str,
    state_bytes: str | None,
    device: str,
    ranks: int,
    engines: str,
    rounds: int,
    budget: str | None,
    against_fio: bool,
    train: bool,
    steps: int,
    sharded_every: int,
    consolidated_every: int,
    json_to: str | None,
    runs_dir: str | None,
    allow_busy: bool,
    seed: int,
    dry_run: bool,
) -> int:
    """Checkpoints of a real model's shapes by every engine, in turns, on the same medium.

    For each: how long the training loop is held, until all is durable, restored from a cold cache, whether what came
    back is what was saved, CPU seconds and host memory. What an engine calls durable is held against the drives'
    counters. Equality alone is judged. Exit codes: 0 measured, all restores equal; 1 an engine brought back something
    else; 2 the call was wrong; 3 an engine failed, or the drives did not prove it.
    """
    from tunetool.bench.checkpoint.request import Request, Training
    from tunetool.bench.checkpoint.run import bench
    from tunetool.cli.verify import check_json, no_empty_paths, parse_duration, write_json
    from tunetool.report.checkpoint import print_checkpoint
    from tunetool.report.checkpoint_page import REPORT, write_page
    from tunetool.report.progress import best_progress
    from tunetool.report.table import table_console

    no_empty_paths({"--target": target, "--memory-target": memory_target, "--json": json_to, "--runs-dir": runs_dir})
    check_json(json_to)
    request = Request(
        model=model,
        target=Path(target) if target is not None else None,
        memory_target=Path(memory_target) if memory_target is not None else None,
        state_bytes=_size(state_bytes),
        device=device,  # type: ignore[arg-type]
        ranks=ranks,
        engines=[each.strip() for each in engines.split(",") if each.strip()],
        rounds=rounds,
        budget=parse_duration(budget) if budget is not None else None,
        against_fio=against_fio,
        training=Training(steps, sharded_every, consolidated_every) if train else None,
        runs_dir=Path(runs_dir) if runs_dir is not None else None,
        allow_busy=allow_busy,
        dry_run=dry_run,
        seed=seed,
        command=sys.argv,
    )
    result = bench(request, best_progress())
    if result.record is not None and result.path is not None:
        write_json(result.record, json_to)
        page = write_page(result.record, result.path.parent / REPORT)
        if json_to != "-":
            print_checkpoint(result.record, result.path, table_console())
        if page is not None:
            click.echo(f"plots: {page}", err=True)
    return int(result.code)


def _size(text: str | None) -> int | None:
    from tunetool.node.units import UnitError, parse_size

    if text is None:
        return None
    try:
        return parse_size(text)
    except UnitError as error:
        raise UsageProblem(error.message, error.hint) from None
