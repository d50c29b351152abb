"""``tunetool bench reference``: read the call, run, print."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tunetool.cli.finetune_options import Options, finetune_options
from tunetool.errors import UsageProblem


@click.command("reference")
@click.option("--expect", multiple=True, metavar="RATE", help="As `verify` takes it. Default: each node's manifest.")
@click.option("--duration", default="4s", show_default=True, metavar="TIME", help="One sample of verify.")
@click.option("--anyway", is_flag=True, help="Go on after a FAIL of verify.")
@click.option("--skip", multiple=True, metavar="PART", help="Leave out verify, checkpoint, staging or strategies.")
@click.option("--memory", default="/dev/shm", show_default=True, metavar="DIR", help="What is staged goes there.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Of every benchmark.")
@click.option(
    "--checkpoint-model", default="phi3-mini", show_default=True, metavar="NAME", help="Whose state is saved."
)
@click.option("--state-bytes", default="8GB", show_default=True, metavar="SIZE", help="Of that state, by whole layers.")
@click.option(
    "--matrix",
    default="1x1:z2,1x8:z2,2x8:z2,2x8:z3,1x8:z3",
    show_default=True,
    metavar="CELL,...",
    help="For strategies: nodes x GPUs : ZeRO stage, scaled to what there is.",
)
@finetune_options
def reference(
    options: Options,
    expect: tuple[str, ...],
    duration: str,
    anyway: bool,
    skip: tuple[str, ...],
    memory: str,
    rounds: int,
    checkpoint_model: str,
    state_bytes: str,
    matrix: str,
) -> int:
    """The whole chain: verify, then checkpoints, staging and strategies; one record over all.

    Each part leaves its own record too. After a FAIL of verify nothing else is measured, unless --anyway. A part that
    cannot run is a line with its reason, and the others go on. Exit codes, over all parts: 1 where one falls short,
    else 3 where one could not be judged, else 0; 2 the call was wrong.
    """
    from tunetool.bench.reference.request import Request
    from tunetool.bench.reference.run import reference as run
    from tunetool.cli.verify import no_empty_paths, parse_duration, parse_expectations, write_json
    from tunetool.report.progress import best_progress
    from tunetool.report.reference import print_reference
    from tunetool.report.table import table_console
    from tunetool.training.settings import Settings

    no_empty_paths({"--memory": memory})
    target, verify_target = _targets(options)
    request = Request(
        material=options.material(model="7b"),
        target=target,
        verify_target=verify_target,
        expect=parse_expectations(expect),
        duration=parse_duration(duration),
        cluster=options.cluster(),
        settings=Settings(epochs=options.epochs or 1, steps=options.steps, batch_size=options.batch_size or 2),
        memory=Path(memory),
        rounds=rounds,
        checkpoint_model=checkpoint_model,
        state_bytes=_size(state_bytes),
        matrix=matrix,
        skip=skip,
        anyway=anyway,
        runs_dir=options.runs(),
        allow_busy=options.allow_busy,
        dry_run=options.dry_run,
        command=sys.argv,
    )
    result = run(request, best_progress())
    if result.record is not None:
        write_json(result.record, options.json_to)
        if options.json_to != "-":
            print_reference(result.record, result.path, table_console())
    return int(result.code)


def _targets(options: Options) -> tuple[Path, Path | None]:
    """Where benchmarks write, and what is verified where that is not the manifest's own mount point."""
    from tunetool.verify.run import read_manifest

    if options.target is None:
        raise UsageProblem("nothing to measure", "`--target DIR` is a directory on the storage of every node")
    target = Path(options.target)
    if options.inventory is not None or read_manifest(None) is not None:
        return target, None
    return target, target


def _size(text: str) -> int:
    from tunetool.node.units import UnitError, parse_size

    try:
        return parse_size(text)
    except UnitError as error:
        raise UsageProblem(error.message, error.hint) from None
