"""The ladder's rungs: their order, what each is compared with, and the share of it that is expected. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tunetool.measure.ladder.budget import EXPECTED
from tunetool.measure.ladder.checkpoint import LOAD, SAVE
from tunetool.measure.ladder.deepspeed_handles import DEVICES
from tunetool.measure.ladder.files import SUSTAINED, URING
from tunetool.measure.ladder.raw import ALONE, ARRAY, TOGETHER
from tunetool.measure.metrics import RANDOM, SEQUENTIAL, Metric
from tunetool.record import Measurement, Rung, chosen


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


def rungs(measurements: Sequence[Measurement], skipped: Mapping[str, str], unproven: Mapping[str, str]) -> list[Rung]:
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
            rows.append(Rung(name=step.name, title=step.title, kind=step.kind, skipped=skipped[step.name]))
    return rows


def first_loss(rows: Sequence[Rung]) -> Rung | None:
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


def _alone(step: Step, drives: Sequence[Measurement], unproven: Mapping[str, str]) -> Rung | None:
    if not drives:
        return None
    total = sum(m.value for m in drives)
    worst = None if ALONE in unproven else slowest(drives)
    if worst is None:
        return Rung(name=step.name, title=step.title, kind=step.kind, value=total)
    return Rung(
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
) -> Rung:
    value, base, title = bandwidth(measurement), None, None
    if "sum_alone" in measurement.parameters:
        base, title = float(measurement.parameters["sum_alone"]), "their sum alone"
    for name in step.below:
        if base is None and name in by_name and name not in unproven:
            base, title = bandwidth(by_name[name]), titles[name]
    if not base or step.name in unproven:
        return Rung(name=step.name, title=step.title, kind=step.kind, value=value)
    least = EXPECTED.get(step.kind)
    return Rung(
        name=step.name,
        title=step.title,
        kind=step.kind,
        value=value,
        below=title,
        share=value / base,
        least=least.least if least else None,
        loses=_loses(measurement, base, least.least if least else None),
    )
