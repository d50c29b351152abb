"""``tunetool bench staging``: its options, and the call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import click

from tunetool.bench.defaults import SHM, STAGING_ROUNDS
from tunetool.cli import training_options
from tunetool.cli.output import finish
from tunetool.cli.training_options import TrainingOptions
from tunetool.fleet.options import HostsCommand
from tunetool.options import shared as options
from tunetool.options.fields import option, takes


@dataclass(frozen=True)
class Options(TrainingOptions):
    """What the call says."""

    memory_target: Path = options.memory_target(
        "Directory in memory on each node, to which path A stages.", default=SHM
    )
    scenarios: str = option(
        "--scenarios",
        default="single,node,nodes",
        metavar="NAME,...",
        help="Scenarios: one GPU, all GPUs of one node, all nodes. One that this machine cannot run is left out, with "
        "the reason.",
    )
    rounds: int = options.rounds(STAGING_ROUNDS)
    zero: int = training_options.zero()
    loader: str = training_options.loader()
    workers: int = training_options.workers()


@click.command("staging", cls=HostsCommand)
@takes(Options)
def staging(given: Options) -> int:
    """Compare the reference fine-tune with its files in memory and on bulk storage.

    Path A copies model and data to --memory-target and reads them there; path B reads them at --target. Both have the
    same seed and steps and cold caches, in a random order in each round. The time of staging counts for path A.
    Only one thing is judged: that both paths have equal losses. Writes a record and a page of plots into the runs
    directory.

    Exit codes: 0 measured, and losses are equal; 1 losses differ; 2 the call was wrong, or memory is too small; 3 a run
    failed, or the cache was not cold.
    """
    from tunetool.bench.staging.request import Request
    from tunetool.bench.staging.run import bench
    from tunetool.bench.staging.scenarios import parse
    from tunetool.cli.under_python import go_on_under
    from tunetool.report.progress import best_progress

    request = Request(
        material=given.material(),
        cluster=given.cluster(),
        settings=replace(
            given.settings(),
            zero_stage=given.zero,
            loader=given.loader,  # type: ignore[arg-type]  # click holds it to the choices
            workers=given.workers,
        ),
        memory=given.memory_target,
        scenarios=parse(given.scenarios),
        rounds=given.rounds,
        run=given.run,
    )
    if given.inventory is None:
        go_on_under(given.python)
    return finish(bench(request, best_progress()), given.json_to)
