"""Runs the ladder: the announcement, the rungs one after the other, and the conclusion."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.measure.fio import DATA_FILE, Fio
from tunetool.measure.ladder import facts, source
from tunetool.measure.ladder.budget import CHECKPOINT_BYTES, SAMPLES, SUSTAINED_BYTES_A_DRIVE, SUSTAINED_SAMPLES
from tunetool.measure.ladder.causes import Facts, diagnose
from tunetool.measure.ladder.checkpoint import TorchCheckpoint
from tunetool.measure.ladder.files import Random, Sustained, Uring
from tunetool.measure.ladder.gpu import Handle
from tunetool.measure.ladder.raw import Alone, Array, Together
from tunetool.measure.ladder.rung import Rung, Scene, Skip, Wish
from tunetool.measure.ladder.rungs import first_loss
from tunetool.measure.ladder.rungs import rungs as rungs_of
from tunetool.measure.ladder.shots import Shooter
from tunetool.measure.ladder.source import RawData
from tunetool.measure.metrics import RANDOM
from tunetool.measure.progress import Progress
from tunetool.measure.sequential import Plan, Results
from tunetool.node.array.stripe import NoStripe, read_stripe
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.machine.drives import Drive
from tunetool.node.units import format_size
from tunetool.record import Ladder, Measurement

_RAW = ("drives alone", "drives together", "array")


@dataclass
class Climbed:
    """Grows rung by rung: what there is when one fails is kept."""

    measurements: list[Measurement] = field(default_factory=list)
    unproven: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """By measurement name, why its rung was not climbed."""
    errors: list[str] = field(default_factory=list)
    raw: dict[str, str] = field(default_factory=dict)


def plan() -> list[Rung]:
    """Every rung, from the bare drives up."""
    alone: dict[str, float] = {}
    handles = [Handle("cuda"), Handle("gds")]
    return [
        Alone(alone), Together(alone), Array(), Uring(), Sustained(), *map(Random, RANDOM), *handles, TorchCheckpoint()
    ]  # fmt: skip


def no_raw(stack: BlockStack, is_root: bool | None = None) -> str | None:
    """Why the raw rungs cannot be climbed, as far as that is known before anything is written."""
    try:
        read_stripe(stack.device or "")
    except NoStripe:
        return f"`{stack.directory}` lies on {stack.medium}: raw rungs need an md RAID0 straight under the file system"
    if not (os.geteuid() == 0 if is_root is None else is_root):
        return "only root may read the drives themselves"
    return None


def announcement(shape: Plan, stack: BlockStack, is_root: bool | None = None) -> list[str]:
    """Lines that describe the ladder before it starts."""
    obstacle, drives = no_raw(stack, is_root), len(stack.leaves)
    rungs = [rung for rung in plan() if not (obstacle and rung.name in _RAW)]
    seconds = sum(rung.seconds(shape, drives) for rung in rungs)
    budget = SUSTAINED_BYTES_A_DRIVE * max(1, drives)
    names = ", ".join(rung.name for rung in rungs)
    return [
        f"then the ladder, about {seconds:.0f} s if nothing is left out: {names}",
        f"{SAMPLES} samples of {shape.duration:g} s each; the sustained write ends after "
        f"{SUSTAINED_SAMPLES * shape.duration:g} s or {format_size(budget)}; a checkpoint of at most "
        f"{format_size(CHECKPOINT_BYTES)} in the same directory, {SAMPLES + 1} times; {_written(shape, budget)}",
        f"raw rungs are left out: {obstacle}"
        if obstacle
        else f"reads {drives} drives and their array themselves, read-only, where this run's own files lie",
    ]


def _written(shape: Plan, budget: float) -> str:
    """How much more is written: io_uring, two handles, random writes, the sustained write, the checkpoint."""
    writing = 3 + sum(each.direction == "write" for each in RANDOM)
    known = budget + (SAMPLES + 1) * CHECKPOINT_BYTES
    if shape.ceiling is None:
        return f"writes at most {format_size(known)} more, and what io_uring and DeepSpeed take in their samples"
    most = known + writing * SAMPLES * shape.duration * shape.ceiling
    return f"writes at most {format_size(most)} more, by the drives' links"


def climb(
    shape: Plan,
    stack: BlockStack,
    fio: Fio,
    directory: Path,
    results: Results,
    drives: Sequence[Drive],
    wish: Wish,
    environment: Mapping[str, str],
    progress: Progress,
    climbed: Climbed,
) -> None:
    """Measure every rung into ``climbed``, in the run's ``directory``, with the files of ``results``."""
    shooter = Shooter(stack, fio, directory, environment, progress, climbed.raw)
    written = [sample.outcome.bandwidth for sample in results.samples.get("write", [])]
    scene = Scene(
        shape,
        stack,
        directory,
        results.file_bytes,
        shooter,
        environment,
        wish,
        drives,
        written=sorted(written)[len(written) // 2] if written else 0.0,
    )
    if not results.direct:
        # Every figure of the ladder rests on direct I/O; without it the page cache would answer.
        for rung in plan():
            climbed.skipped.update(dict.fromkeys(rung.covers(), "the file system takes no direct I/O"))
        return
    find_raw(scene)
    for rung in plan():
        _run_rung(rung, scene, climbed)
    if scene.raw is not None and not source.unmoved(scene.raw):
        reason = "the file system moved the files meanwhile: what was read may not have been theirs"
        climbed.unproven.update({m.name: reason for m in climbed.measurements if m.layer in ("drive", "md")})


def find_raw(scene: Scene) -> None:
    """Where the run's files lie on the drives, proven by reading it both ways; or why that is not known."""
    names = [DATA_FILE.format(number=number) for number in range(scene.shape.jobs)]
    scene.raw, scene.no_raw = raw_data(scene.stack, [scene.directory / name for name in names])


def raw_data(stack: BlockStack, files: Sequence[Path]) -> tuple[RawData | None, str]:
    """Where ``files`` lie on the drives, proven by reading it both ways; or None, and why that is not known."""
    obstacle = no_raw(stack)
    if obstacle:
        return None, obstacle
    try:
        raw = source.find(stack, files)
        source.prove(raw)
    except (source.NoRawData, OSError) as error:
        return None, str(error)
    return raw, ""


def _run_rung(rung: Rung, scene: Scene, climbed: Climbed) -> None:
    try:
        result = rung.run(scene)
    except Skip as reason:
        scene.shooter.progress.say(f"{rung.name}: skipped: {reason}")
        climbed.skipped.update(dict.fromkeys(rung.covers(), str(reason)))
    except CannotJudge as error:
        # A handle that fails is reported, and counts if DeepSpeed is required, as at level quick.
        if scene.wish.require_deepspeed or not isinstance(rung, Handle):
            climbed.errors.append(f"{rung.name}: {error.message}" + (f"; {error.hint}" if error.hint else ""))
        climbed.skipped.update(dict.fromkeys(rung.covers(), f"it failed: {error.message}"))
    else:
        climbed.measurements += result.measurements
        climbed.unproven.update(result.unproven)


def conclude(
    measurements: Sequence[Measurement],
    skipped: Mapping[str, str],
    unproven: Mapping[str, str],
    read_facts: Callable[[], Facts],
) -> Ladder:
    """The rungs against each other, and the first that loses with its cause."""
    rungs = rungs_of(measurements, skipped, unproven)
    worst = first_loss(rungs)
    loss = diagnose(facts.step_of(worst, measurements), read_facts()) if worst else None
    return Ladder(rungs=rungs, loss=loss)
