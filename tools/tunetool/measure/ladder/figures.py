"""From the ladder's samples to the record's measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from tunetool.measure import evidence
from tunetool.measure.direction import Direction
from tunetool.measure.evidence import wrong_clock
from tunetool.measure.figure import Quantity, What, measured
from tunetool.measure.fio import Outcome
from tunetool.measure.ladder.rung import Result
from tunetool.measure.sequential import Sample
from tunetool.node.machine.block_stack import BlockStack
from tunetool.record import Scalar


@dataclass(frozen=True)
class Label:
    """What a figure is."""

    form: str
    """Of its name."""
    layer: str
    engine: str
    direction: Direction
    medium: str
    rate: bool = False
    """Requests per second, not bytes."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Those beside the direction."""
    figure: str = ""
    """Empty: ``bandwidth``, or ``rate``."""


def figure(label: Label, stack: BlockStack, samples: Sequence[Sample], parameters: Mapping[str, Scalar]) -> Result:
    """One measurement of the samples, whose bytes the devices of ``stack`` counted."""
    value: Callable[[Outcome], float] = lambda outcome: outcome.rate if label.rate else outcome.bandwidth  # noqa: E731
    values = [value(sample.outcome) for sample in samples]
    cores = median(sample.outcome.cores for sample in samples)
    quantity: Quantity = "rate" if label.rate else "bandwidth"
    what = What(
        label.form,
        quantity,
        label.engine,
        label.medium,
        label.figure or quantity,
        {"direction": label.direction, **label.labels},
        label.layer,
        {"direction": label.direction, **parameters, "cores_used": round(cores, 3)},
    )
    measurement = measured(what, stack, samples, values, [sample.outcome.percentiles for sample in samples])
    reason = doubt(stack, label.direction, samples)
    return Result([measurement], {measurement.name: reason} if reason else {})


def doubt(stack: BlockStack, direction: Direction, samples: Sequence[Sample]) -> str | None:
    """Why the samples prove nothing; None where the counters agree, in bytes and in time."""
    reason = evidence.doubt(stack, direction, [sample.counted for sample in samples])
    if reason:
        return reason
    return wrong_clock((sample.counted, sample.outcome.seconds) for sample in samples)
