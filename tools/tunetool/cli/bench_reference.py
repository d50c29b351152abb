"""``tunetool bench reference``: its options, and the call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from tunetool.bench.defaults import CHECKPOINT_MODEL, SHM, STAGING_ROUNDS, STATE_BYTES
from tunetool.cli.output import finish
from tunetool.cli.training_options import TrainingOptions
from tunetool.fleet.options import HostsCommand, need_inventory
from tunetool.options import shared as options
from tunetool.options.fields import option, repeatable, takes
from tunetool.options.values import SIZE, TEXT
from tunetool.verify.expectable import parse_expectations


@dataclass(frozen=True)
class Options(TrainingOptions):
    """What the call says."""

    expect: tuple[str, ...] = options.expect()
    duration: float = options.duration_of_sample()
    anyway: bool = option(
        "--anyway", is_flag=True, help="Go on after a FAIL of verify; with -i: keep nodes that fail it."
    )
    all_or_nothing: bool = option(
        "--all-or-nothing", is_flag=True, help="With -i: stop where a node fails verify or does not answer."
    )
    skip: tuple[str, ...] = repeatable(
        "--skip",
        metavar="PART",
        help="Part to leave out: verify, checkpoint, staging or strategies. Repeatable.",
    )
    memory_target: Path = options.memory_target(
        "Directory in memory on each node, to which files are staged.", default=SHM
    )
    rounds: int = options.rounds(STAGING_ROUNDS)
    checkpoint_model: str | None = option(
        "--checkpoint-model",
        type=TEXT,
        metavar="NAME",
        help=f"Model whose state is saved, as for `bench checkpoint --model`. Default: {CHECKPOINT_MODEL}, or "
        "tiny where there is too little room.",
    )
    state_bytes: int | None = option(
        "--state-bytes",
        type=SIZE,
        help=f"Upper bound of the state, such as `2GB`. Default: {STATE_BYTES}, or what every node has room for.",
    )
    matrix: str | None = option(
        "--matrix",
        metavar="CELL,...",
        help="Strategies as NODESxGPUS:zSTAGE. Default: one GPU, one node, all nodes; as the nodes allow.",
    )


@click.command("reference", cls=HostsCommand)
@takes(Options)
def reference(given: Options) -> int:
    """Run everything in one go: verify, then checkpoints, staging and strategies.

    Without other options the nodes decide: --target is the volume of the manifest, --model the largest that the GPUs
    and the memory of every node take, --matrix what the nodes can run. Says first what it will write, where, and how
    long it takes; --dry-run stops there.

    Each part writes a record of its own, and one record over all parts follows. A node of -i that fails verify, or does
    not answer any more, is left out with its reason, and the others go on. On one machine nothing else is measured
    after a FAIL of verify, unless --anyway is given. A part that cannot run is listed with its reason, and the others
    go on.

    Exit codes, over all parts: 1 a part falls short; else 3 a part could not be judged, or a node was lost; else 0. 2
    the call was wrong.
    """
    from tunetool.bench.reference.request import Asked
    from tunetool.bench.reference.run import reference as run
    from tunetool.cli.under_python import go_on_under
    from tunetool.report.progress import best_progress

    need_inventory(given.inventory, all_or_nothing=given.all_or_nothing)
    asked = Asked(
        model=given.model,
        dataset=given.dataset,
        images=given.images,
        target=given.target,
        seed=given.seed,
        expect=parse_expectations(given.expect),
        duration=given.duration,
        cluster=given.cluster(),
        settings=given.settings(),
        memory=given.memory_target,
        rounds=given.rounds,
        checkpoint_model=given.checkpoint_model,
        state_bytes=given.state_bytes,
        matrix=given.matrix,
        skip=given.skip,
        anyway=given.anyway,
        all_or_nothing=given.all_or_nothing,
        run=given.run,
    )
    if given.inventory is None:
        # Without such a Python `verify` still says what the storage is worth.
        go_on_under(given.python, required=False)
    return finish(run(asked, best_progress()), given.json_to)
