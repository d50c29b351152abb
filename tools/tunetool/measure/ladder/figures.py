"""From the ladder's samples to the record's measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from tunetool.measure.direction import Direction
from tunetool.measure.evidence import explain, summed, worst, wrong_clock
from tunetool.measure.fio import Outcome
from tunetool.measure.sequential import Sample
from tunetool.measure.statistics import drift, estimate
from tunetool.node.machine.block_stack import BlockStack
from tunetool.record import Confidence, Measurement, Scalar, Trend


@dataclass
class Found:
    """What a rung measured."""

    measurements: list[Measurement] = field(default_factory=list)
    unproven: dict[str, str] = field(default_factory=dict)
    """By measurement name, why its samples prove nothing."""

    def add(self, other: Found) -> None:
        """Take over what another one holds."""
        self.measurements += other.measurements
        self.unproven.update(other.unproven)


@dataclass(frozen=True)
class Label:
    """What a figure is."""

    name: str
    layer: str
    engine: str
    direction: Direction
    medium: str
    rate: bool = False
    """Requests per second, not bytes."""


def figure(label: Label, stack: BlockStack, samples: Sequence[Sample], parameters: Mapping[str, Scalar]) -> Found:
    """One measurement of the samples, whose bytes the devices of ``stack`` counted."""
    value: Callable[[Outcome], float] = lambda outcome: outcome.rate if label.rate else outcome.bandwidth  # noqa: E731
    values = [value(sample.outcome) for sample in samples]
    found = estimate(values)
    change = drift([sample.moment for sample in samples], values)
    middle = min(samples, key=lambda sample: abs(value(sample.outcome) - found.value))
    measurement = Measurement(
        name=label.name,
        layer=label.layer,
        engine=label.engine,
        medium=label.medium,
        quantity="rate" if label.rate else "bandwidth",
        unit="1/s" if label.rate else "B/s",
        better="higher",
        value=found.value,
        samples=values,
        confidence=Confidence(level=found.level, low=found.low, high=found.high, method=found.method),
        trend=Trend(slope_per_second=change.slope_per_second, significant=change.significant, change=change.change),
        percentiles=middle.outcome.percentiles or None,
        parameters={
            "direction": label.direction,
            **parameters,
            "cores_used": round(median(sample.outcome.cores for sample in samples), 3),
        },
        evidence=summed(stack, [each.counted for each in samples], sum(each.outcome.claimed_bytes for each in samples)),
    )
    reason = doubt(stack, label.direction, samples)
    return Found([measurement], {label.name: reason} if reason else {})


def doubt(stack: BlockStack, direction: Direction, samples: Sequence[Sample]) -> str | None:
    """Why the samples prove nothing; None where the counters agree, in bytes and in time."""
    counted = [sample.counted for sample in samples if sample.counted is not None]
    bad = [sample for sample in counted if sample.judgement != "proven"]
    if bad:
        return explain(stack, direction, worst(bad))
    return wrong_clock((sample.counted, sample.outcome.seconds) for sample in samples)
