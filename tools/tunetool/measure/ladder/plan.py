"""The ladder: its rungs, what is said of them beforehand, and what they say together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tunetool.measure.ladder import facts
from tunetool.measure.ladder.budget import CHECKPOINT_BYTES, SAMPLES, SUSTAINED_BYTES_A_DRIVE, SUSTAINED_SAMPLES
from tunetool.measure.ladder.causes import Facts, diagnose
from tunetool.measure.ladder.checkpoint import TorchCheckpoint
from tunetool.measure.ladder.deepspeed_handles import Handle
from tunetool.measure.ladder.files import Random, Sustained, Uring
from tunetool.measure.ladder.raw import Alone, Array, Together
from tunetool.measure.ladder.rung import Rung
from tunetool.measure.ladder.rungs import first_loss
from tunetool.measure.ladder.rungs import rungs as rungs_of
from tunetool.measure.ladder.source import no_raw
from tunetool.measure.metrics import RANDOM
from tunetool.measure.sequential import Plan
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.units import format_size
from tunetool.record import Ladder, Measurement

_RAW = ("drives alone", "drives together", "array")


def rungs() -> list[Rung]:
    """Every rung, from the bare drives up."""
    alone: dict[str, float] = {}
    handles = [Handle("cuda"), Handle("gds")]
    return [
        Alone(alone), Together(alone), Array(), Uring(), Sustained(), *map(Random, RANDOM), *handles, TorchCheckpoint()
    ]  # fmt: skip


def announcement(shape: Plan, stack: BlockStack, is_root: bool | None = None) -> list[str]:
    """Lines that describe the ladder before it starts."""
    obstacle, drives = no_raw(stack, is_root), len(stack.leaves)
    planned = [rung for rung in rungs() if not (obstacle and rung.name in _RAW)]
    seconds = sum(rung.seconds(shape, drives) for rung in planned)
    budget = SUSTAINED_BYTES_A_DRIVE * max(1, drives)
    names = ", ".join(rung.name for rung in planned)
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
