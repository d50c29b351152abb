"""From the handle's samples to the record's measurements, and to the reasons why a figure proves nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunetool.measure import Direction, evidence, tester
from tunetool.measure.aio.driver import Outcome, Pass
from tunetool.measure.aio.spec import Device, Spec
from tunetool.measure.figure import What, measured
from tunetool.node.machine.block_stack import BlockStack
from tunetool.record import Measurement, Scalar

FORM = "deepspeed.{memory}.{direction}"


def name(device: Device, direction: Direction) -> str:
    """Of the measurement: ``deepspeed.cpu.write``."""
    return FORM.format(memory=device, direction=direction)


def measurements(spec: Spec, stack: BlockStack, outcome: Outcome) -> list[Measurement]:
    """One figure for each direction that has samples; a write's time includes its sync."""
    return [
        figure(FORM, spec, stack, outcome, direction, [each.bandwidth for each in samples], {"memory": spec.device})
        for direction, samples in sorted(outcome.samples.items())
        if samples
    ]


def figure(
    form: str,
    spec: Spec,
    stack: BlockStack,
    outcome: Outcome,
    direction: Direction,
    values: list[float],
    labels: Mapping[str, str] | None = None,
    figure: str = "bandwidth",
) -> Measurement:
    """A bandwidth over the samples of ``direction``. ``form``: of its name; ``labels``: those beside the direction."""
    parameters: dict[str, Scalar] = {
        "direction": direction,
        "device": spec.device,
        "block_bytes": spec.block_bytes,
        "queue_depth": spec.queue_depth,
        "intra_op_parallelism": spec.intra_op_parallelism,
        "single_submit": spec.single_submit,
        "overlap_events": spec.overlap_events,
        "medium": stack.medium,
        "file_bytes": spec.io_bytes,
        "pinned_by": spec.pinned_by,
        "call": spec.call,
        "pending": spec.pending,
        "python": str(spec.python),
        "repeated_samples": outcome.repeated[direction].taken,
        **tester.cpu_share(
            [each.cores for each in outcome.samples[direction] if each.cores is not None], spec.intra_op_parallelism
        ),
    }
    if spec.seconds:
        parameters["sample_seconds"] = spec.seconds
    known = {"direction": direction, **(labels or {})}
    what = What(form, "bandwidth", outcome.engine, stack.medium, figure, known, parameters=parameters)
    return measured(what, stack, outcome.samples[direction], values)


def unproven(spec: Spec, stack: BlockStack, outcome: Outcome) -> dict[str, str]:
    """By measurement name, why its samples prove nothing; empty when the counters agree."""
    reasons = {}
    for direction, samples in outcome.samples.items():
        reason = doubt(stack, direction, samples, spec.handle)
        if reason:
            reasons[name(spec.device, direction)] = reason
    return reasons


def doubt(stack: BlockStack, direction: Direction, samples: Sequence[Pass], engine: str) -> str:
    """Why ``samples`` prove nothing; empty where the drives' counters agree with all of them."""
    reason = evidence.doubt(stack, direction, [each.counted for each in samples], engine)
    if reason is None and any(each.counted is None for each in samples):
        return f"no counters prove bytes on {stack.medium}"
    return reason or ""
