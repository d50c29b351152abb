"""``tunetool bench strategies``: its options, and the call."""

from __future__ import annotations

from dataclasses import dataclass, replace

import click

from tunetool.bench.defaults import MATRIX, NETWORK_SECONDS, STRATEGIES_ROUNDS, STRATEGIES_STEPS
from tunetool.cli import training_options
from tunetool.cli.output import finish
from tunetool.cli.training_options import TrainingOptions
from tunetool.errors import UsageProblem
from tunetool.fleet.options import HostsCommand
from tunetool.options import shared as options
from tunetool.options.fields import option, takes
from tunetool.options.values import DURATION


@dataclass(frozen=True)
class Options(TrainingOptions):
    """What the call says."""

    matrix: str = options.matrix(MATRIX)
    rounds: int = options.rounds(STRATEGIES_ROUNDS)
    lora_rank: int = training_options.lora_rank()
    full: bool = training_options.full()
    network_time: float = option(
        "--network-time",
        type=DURATION,
        default=f"{NETWORK_SECONDS}s",
        help="Approximate time for measuring the network of each layout.",
    )


@click.command("strategies", cls=HostsCommand)
@takes(Options)
def strategies(given: Options) -> int:
    """Compare ZeRO stages on different numbers of GPUs and nodes, each with its predicted time of a step.

    Measures the network between the ranks of each layout first, computes from the model which bytes each strategy must
    move in a step, and predicts each cell before it runs. Two things are judged: that every cell trains, and that the
    stages compute the same. Writes a record and a page of plots into the runs directory.

    Exit codes: 0 all cells ran; 1 a loss is not a number, or differs from another stage's; 2 the call was wrong; 3 a
    cell could not run.
    """
    from tunetool.bench.strategies.matrix import parse
    from tunetool.bench.strategies.request import Request
    from tunetool.bench.strategies.run import bench
    from tunetool.cli.under_python import go_on_under
    from tunetool.report.progress import best_progress
    from tunetool.training_python import DEEPSPEED

    if given.epochs is not None:
        raise UsageProblem(
            "`--epochs` has no meaning here", f"use `--steps`; a few are enough (default: {STRATEGIES_STEPS})"
        )
    request = Request(
        material=given.material(),
        matrix=parse(given.matrix),
        cluster=given.cluster(),
        settings=replace(
            given.settings(),
            steps=given.steps or STRATEGIES_STEPS,
            lora_rank=given.lora_rank,
            full=given.full,
            curves=None,
        ),
        rounds=given.rounds,
        network_seconds=given.network_time,
        run=given.run,
    )
    if given.inventory is None:
        go_on_under(given.python, () if given.dry_run else DEEPSPEED)
    return finish(bench(request, best_progress()), given.json_to)
