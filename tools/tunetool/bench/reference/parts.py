"""The parts of the chain: they call the functions behind `verify` and the other benchmarks, here or on every host."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from tunetool.bench.checkpoint.request import KIND as CHECKPOINT
from tunetool.bench.checkpoint.states import shape
from tunetool.bench.reference import headlines
from tunetool.bench.reference.chain import Outcome, Step
from tunetool.bench.reference.request import Complete, parts_without
from tunetool.fleet.playbook import HostSelection
from tunetool.fleet.run_on_hosts import Call, HostCommand, record_over, run_everywhere
from tunetool.measure.progress import MovingProgress
from tunetool.record import Record
from tunetool.training.request import TrainingRequest
from tunetool.training_python import choose

_CHECKPOINT_SECONDS = 300.0
"""Title of the progress bar over all hosts."""


def steps(request: Complete, progress: MovingProgress, current: Callable[[], Complete] | None = None) -> list[Step]:
    """The parts that are not left out. ``current``: the request when a part begins. Raises ``UsageProblem``."""
    asked = current or (lambda: request)
    chosen = parts_without(request.skip)
    # A part would refuse this only after the others have measured. A model on the hosts need not exist here.
    if "checkpoint" in chosen and request.cluster.inventory is None:
        shape(request.checkpoint_model, request.state_bytes, request.cluster.ranks_per_node or 1)

    def run(name: str) -> Outcome:
        return _RUN[name](asked(), progress)

    return [Step(name, partial(run, name), _HEADLINES[name]) for name in chosen]


def _verify(request: Complete, progress: MovingProgress) -> Outcome:
    from tunetool.fleet.verify import FleetRequest, verify_fleet  # noqa: PLC0415  (each part loads its own)
    from tunetool.verify.request import Request as Verify  # noqa: PLC0415
    from tunetool.verify.run import verify  # noqa: PLC0415

    target, cluster = request.verify_target, request.cluster
    if cluster.inventory is not None:
        fleet = verify_fleet(
            FleetRequest(
                selection=HostSelection(cluster.inventory, cluster.limit, ansible=cluster.ansible),
                expect=request.expected,
                duration=request.duration,
                target=str(target) if target is not None else None,
                python=cluster.python,
                run=request.run,
            ),
            progress,
        )
        return fleet.record, fleet.path
    chosen = choose(cluster.python)
    alone = verify(
        Verify(
            expect=request.expected,
            duration=request.duration,
            target=target,
            python=chosen.path,
            chosen=chosen,
            run=request.run,
        ),
        progress,
        chosen.environment(os.environ),
    )
    return alone.record, alone.path


def _checkpoint(request: Complete, progress: MovingProgress) -> Outcome:
    from tunetool.bench.checkpoint.request import Request as Checkpoint  # noqa: PLC0415
    from tunetool.bench.checkpoint.run import bench  # noqa: PLC0415

    if request.cluster.inventory is not None:
        return _checkpoint_on_hosts(request, request.cluster.inventory, progress)
    result = bench(
        Checkpoint(
            model=request.checkpoint_model,
            target=request.target,
            state_bytes=request.state_bytes,
            device=request.cluster.device,
            ranks=request.cluster.ranks_per_node or 1,
            **request.in_rounds,
            seed=request.material.seed,
            runs_dir=request.run.runs_dir,
            allow_busy=request.run.allow_busy,
            dry_run=request.run.dry_run,
        ),
        progress,
    )
    return result.record, result.path


def checkpoint_arguments(request: Complete) -> list[str]:
    """The request as arguments of `tunetool bench checkpoint`, for the hosts of an inventory."""
    argv = ["--target", str(request.target), "--model", request.checkpoint_model]
    argv += ["--state-bytes", f"{request.state_bytes}B"] if request.state_bytes is not None else []
    argv += ["--device", request.cluster.device, "--ranks", str(request.cluster.ranks_per_node or 1)]
    asked = request.in_rounds
    argv += ["--rounds", str(asked["rounds"])] if asked["rounds"] is not None else []
    argv += ["--budget", f"{asked['budget']:g}s"] if asked["budget"] is not None else []
    argv += ["--thorough"] if asked["thorough"] else []
    argv += ["--seed", str(request.material.seed)]
    # Without a name each host takes the one in its manifest.
    argv += ["--python", request.cluster.python] if request.cluster.python is not None else []
    return argv + (["--allow-busy"] if request.run.allow_busy else [])


def _checkpoint_on_hosts(request: Complete, inventory: Path, progress: MovingProgress) -> Outcome:
    wanted = HostCommand("run_tunetool", checkpoint_arguments(request), command=["bench", "checkpoint"])
    selection = HostSelection(inventory, request.cluster.limit, ansible=request.cluster.ansible)
    words = "`tunetool bench checkpoint --dry-run` on a host says what would be written there"
    fleet = run_everywhere(
        wanted,
        Call(selection, request.run.runs_dir, words if request.run.dry_run else None),
        _CHECKPOINT_SECONDS,
        progress,
        figures=_kind,
        over=lambda hosts, started: record_over(request.run.command, str(request.target), started, hosts),
    )
    return fleet.record, fleet.path


def _kind(record: Record) -> list[str]:
    return [CHECKPOINT] if record.kind == CHECKPOINT else []


def _training(request: Complete) -> dict[str, Any]:
    """What every benchmark with a training is asked."""
    return {each.name: getattr(request, each.name) for each in fields(TrainingRequest)}


def _staging(request: Complete, progress: MovingProgress) -> Outcome:
    from tunetool.bench.staging.request import Request as Staging  # noqa: PLC0415
    from tunetool.bench.staging.run import bench  # noqa: PLC0415

    result = bench(
        Staging(**_training(request), memory=request.memory, **request.in_rounds),
        progress,
    )
    return result.record, result.path


def _strategies(request: Complete, progress: MovingProgress) -> Outcome:
    from tunetool.bench.strategies.matrix import parse  # noqa: PLC0415
    from tunetool.bench.strategies.request import Request as Strategies  # noqa: PLC0415
    from tunetool.bench.strategies.run import bench  # noqa: PLC0415

    result = bench(
        Strategies(**_training(request), matrix=tuple(parse(request.matrix)), **request.in_rounds),
        progress,
    )
    return result.record, result.path


_RUN = {"verify": _verify, "checkpoint": _checkpoint, "staging": _staging, "strategies": _strategies}
_HEADLINES = {
    "verify": headlines.verify,
    "checkpoint": headlines.checkpoint,
    "staging": headlines.staging,
    "strategies": headlines.strategies,
}
