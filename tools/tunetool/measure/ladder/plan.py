"""The ladder: its rungs, what is said of them beforehand, what each is compared with and the share of it that is
expected, and what they say together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tunetool.measure.ladder import facts
from tunetool.measure.ladder.budget import (
    CHECKPOINT_BYTES,
    EXPECTED,
    SAMPLES,
    SUSTAINED_BYTES_A_DRIVE,
    SUSTAINED_SAMPLES,
)
from tunetool.measure.ladder.causes import Facts, diagnose
from tunetool.measure.ladder.checkpoint import LOAD, SAVE, TorchCheckpoint
from tunetool.measure.ladder.deepspeed_handles import DEVICES, Handle
from tunetool.measure.ladder.files import SUSTAINED, URING, Random, Sustained, Uring
from tunetool.measure.ladder.raw import ALONE, ARRAY, TOGETHER, Alone, Array, Together
from tunetool.measure.ladder.rung import Rung
from tunetool.measure.ladder.source import no_raw
from tunetool.measure.metrics import RANDOM, SEQUENTIAL, Metric
from tunetool.measure.sequential import Plan
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.units import format_size
from tunetool.record import Ladder, Measurement, chosen
from tunetool.record import Rung as Row


@dataclass(frozen=True)
class Step:
    """One row: a measurement's name, and the first of ``below`` that was measured."""

    name: str
    title: str
    kind: str
    """A key of ``EXPECTED``; others have no expected share."""
    below: tuple[str, ...] = ()


def steps(drives: Sequence[int]) -> list[Step]:
    """The rows, from the drives up; ``drives`` are the numbers that were read together."""
    read, write = SEQUENTIAL
    together = [
        Step(TOGETHER.format(direction="read", drives=count), f"{count} drives together", "together")
        for count in drives
    ] or [Step(TOGETHER.format(direction="read", drives="N"), "drives together", "together")]
    top = TOGETHER.format(direction="read", drives=max(drives)) if drives else ""
    uring = {direction: URING.format(direction=direction, io_engine="io_uring") for direction in ("read", "write")}
    handles = [
        Step(
            f"deepspeed.{device}.{direction}",
            f"{title} {direction}",
            {"cpu": "aio", "cuda": "hbm-bounce", "gds": "hbm-direct"}[device],
            (base,) if device == "cpu" else (f"deepspeed.cpu.{direction}", base),
        )
        for direction, base in (("read", read.name), ("write", write.name))
        for device, title in DEVICES.items()
    ]
    return [
        Step(ALONE, "drives alone, their sum", "alone"),
        *together,
        Step(ARRAY, "array raw read", "array", (top,)),
        _step(read),
        Step(uring["read"], "fs io_uring read", "engine", (read.name,)),
        _step(write),
        Step(uring["write"], "fs io_uring write", "engine", (write.name,)),
        Step(SUSTAINED, "fs sustained write", "sustained", (write.name,)),
        *(_step(each) for each in RANDOM),
        *handles,
        Step(LOAD, "torch.load", "checkpoint", (read.name,)),
        Step(SAVE, "torch.save, synced", "checkpoint", (write.name,)),
    ]


def _step(metric: Metric) -> Step:
    return Step(metric.name, metric.title, metric.kind, metric.below)


def bandwidth(measurement: Measurement) -> float:
    """Bytes per second, of a rate of requests too."""
    if measurement.unit == "1/s":
        return measurement.value * float(measurement.parameters["block_bytes"])
    return measurement.value


def together_counts(measurements: Sequence[Measurement]) -> list[int]:
    """How many drives were read together, in ascending order."""
    return sorted(int(each.labels["drives"]) for each in chosen(measurements, subject="drives"))


def rows_of(measurements: Sequence[Measurement], skipped: Mapping[str, str], unproven: Mapping[str, str]) -> list[Row]:
    """The rows of what was measured or skipped. A figure without proof is shown and compared with nothing."""
    bare = {m.name: "no counters" for m in measurements if m.evidence is None or m.evidence.kind != "block"}
    unproven = {**bare, **unproven}
    by_name = {m.name: m for m in measurements if m.name != ALONE}
    plan = steps(together_counts(measurements))
    titles = {step.name: step.title for step in plan}
    rows = []
    for step in plan:
        if step.name == ALONE:
            row = _alone(step, [m for m in measurements if m.name == ALONE], unproven)
        elif step.name in by_name:
            row = _row(step, by_name[step.name], by_name, titles, unproven)
        else:
            row = None
        if row is not None:
            rows.append(row)
        elif step.name in skipped:
            rows.append(Row(name=step.name, title=step.title, kind=step.kind, skipped=skipped[step.name]))
    return rows


def first_loss(rows: Sequence[Row]) -> Row | None:
    """The lowest rung that keeps less than it should."""
    return next((rung for rung in rows if rung.loses), None)


def _loses(measurement: Measurement, base: float, least: float | None) -> bool:
    """Not one of its samples may reach the share: a rung that only jitters is not named."""
    if least is None:
        return False
    best = measurement.confidence.high if measurement.confidence else measurement.value
    return bandwidth(measurement.model_copy(update={"value": best})) < least * base


def slowest(drives: Sequence[Measurement]) -> tuple[Measurement, float] | None:
    """The slowest drive alone, and its share of the median of the others."""
    if len(drives) < 2:
        return None
    worst = min(drives, key=lambda m: m.value)
    return worst, worst.value / median([m.value for m in drives if m is not worst])


def _alone(step: Step, drives: Sequence[Measurement], unproven: Mapping[str, str]) -> Row | None:
    if not drives:
        return None
    total = sum(m.value for m in drives)
    worst = None if ALONE in unproven else slowest(drives)
    if worst is None:
        return Row(name=step.name, title=step.title, kind=step.kind, value=total)
    return Row(
        name=step.name,
        title=step.title,
        kind=step.kind,
        value=total,
        below="the others' median",
        share=worst[1],
        least=EXPECTED[step.kind].least,
        loses=_loses(worst[0], worst[0].value / worst[1], EXPECTED[step.kind].least),
    )


def _row(
    step: Step,
    measurement: Measurement,
    by_name: Mapping[str, Measurement],
    titles: Mapping[str, str],
    unproven: Mapping[str, str],
) -> Row:
    value, base, title = bandwidth(measurement), None, None
    if "sum_alone" in measurement.parameters:
        base, title = float(measurement.parameters["sum_alone"]), "their sum alone"
    for name in step.below:
        if base is None and name in by_name and name not in unproven:
            base, title = bandwidth(by_name[name]), titles[name]
    if not base or step.name in unproven:
        return Row(name=step.name, title=step.title, kind=step.kind, value=value)
    least = EXPECTED.get(step.kind)
    return Row(
        name=step.name,
        title=step.title,
        kind=step.kind,
        value=value,
        below=title,
        share=value / base,
        least=least.least if least else None,
        loses=_loses(measurement, base, least.least if least else None),
    )


_RAW = ("drives alone", "drives together", "array")


def all_rungs() -> list[Rung]:
    """Every rung, from the bare drives up."""
    alone: dict[str, float] = {}
    handles = [Handle("cuda"), Handle("gds")]
    return [
        Alone(alone), Together(alone), Array(), Uring(), Sustained(), *map(Random, RANDOM), *handles, TorchCheckpoint()
    ]  # fmt: skip


def announcement(shape: Plan, stack: BlockStack, is_root: bool | None = None) -> list[str]:
    """Lines that describe the ladder before it starts."""
    obstacle, drives = no_raw(stack, is_root), len(stack.leaves)
    planned = [rung for rung in all_rungs() if not (obstacle and rung.name in _RAW)]
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
    rows = rows_of(measurements, skipped, unproven)
    worst = first_loss(rows)
    loss = diagnose(facts.step_of(worst, measurements), read_facts()) if worst else None
    return Ladder(rungs=rows, loss=loss)
