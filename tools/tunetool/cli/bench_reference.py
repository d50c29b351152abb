"""``tunetool bench reference``: its options, and the call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from tunetool.bench.defaults import CHECKPOINT_MODEL, MATRIX, SHM, STAGING_ROUNDS, STATE_BYTES
from tunetool.cli import options
from tunetool.cli.options import HostsCommand, option, takes
from tunetool.cli.output import finish
from tunetool.cli.training_options import TrainingOptions
from tunetool.cli.values import TEXT, parse_expectations
from tunetool.errors import UsageProblem


@dataclass(frozen=True)
class Options(TrainingOptions):
    """What the call says."""

    expect: tuple[str, ...] = options.expect()
    duration: float = options.duration_of_sample()
    anyway: bool = option("--anyway", is_flag=True, help="Go on after a FAIL of verify.")
    skip: tuple[str, ...] = option(
        "--skip",
        multiple=True,
        metavar="PART",
        help="Part to leave out: verify, checkpoint, staging or strategies. Repeatable.",
    )
    memory_target: Path = options.memory_target(
        "Directory in memory on each node, to which files are staged.", default=SHM
    )
    rounds: int = options.rounds(STAGING_ROUNDS)
    checkpoint_model: str = option(
        "--checkpoint-model",
        type=TEXT,
        default=CHECKPOINT_MODEL,
        metavar="NAME",
        help="Model whose state is saved, as for `bench checkpoint --model`.",
    )
    state_bytes: int = options.state_bytes(default=STATE_BYTES)
    matrix: str = options.matrix(MATRIX)


@click.command("reference", cls=HostsCommand)
@takes(Options)
def reference(given: Options) -> int:
    """Run everything in one go: verify, then checkpoints, staging and strategies.

    Each part writes a record of its own, and one record over all parts follows. After a FAIL of verify nothing else is
    measured, unless --anyway is given. A part that cannot run is listed with its reason, and the others continue.

    Exit codes, over all parts: 1 a part falls short; else 3 a part could not be judged; else 0. 2 the call was wrong.
    """
    from tunetool.bench.reference.request import Request
    from tunetool.bench.reference.run import reference as run
    from tunetool.report.progress import best_progress
    from tunetool.training.settings import BATCH_SIZE, Settings

    target, verify_target = _targets(given)
    request = Request(
        material=given.material(model="7b"),
        target=target,
        verify_target=verify_target,
        expect=parse_expectations(given.expect),
        duration=given.duration,
        cluster=given.cluster(),
        settings=Settings(
            epochs=given.epochs or 1,
            steps=given.steps,
            batch_size=given.micro_batch or BATCH_SIZE,
            precision=given.precision,
        ),
        memory=given.memory_target,
        rounds=given.rounds,
        checkpoint_model=given.checkpoint_model,
        state_bytes=given.state_bytes,
        matrix=given.matrix,
        skip=given.skip,
        anyway=given.anyway,
        run=given.run(),
    )
    return finish(run(request, best_progress()), given.json_to)


def _targets(given: Options) -> tuple[Path, Path | None]:
    """The target of the benchmarks, and that of verify (None: the manifest's mount point)."""
    from tunetool.verify.run import read_manifest

    if given.target is None:
        raise UsageProblem("nothing to measure", "add `--target DIR`, a directory on the storage of every node")
    if given.inventory is not None or read_manifest(None) is not None:
        return given.target, None
    return given.target, given.target
