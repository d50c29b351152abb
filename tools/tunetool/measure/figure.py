"""Makes a figure of a record from samples: median, interval, trend, percentiles, proof. Every figure is built here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tunetool.measure.evidence import summed
from tunetool.measure.sampling import Sample
from tunetool.measure.statistics import Estimate, drift, estimate
from tunetool.node.machine.block_stack import BlockStack
from tunetool.record import Confidence, Evidence, Measurement, Scalar, Trend

Quantity = Literal["bandwidth", "duration", "rate", "latency", "memory", "ratio"]
Better = Literal["higher", "lower"]


class _Kind(NamedTuple):
    unit: Literal["B/s", "s", "1/s", "B", "1"]
    better: Better


_KINDS: Mapping[Quantity, _Kind] = {
    "bandwidth": _Kind("B/s", "higher"),
    "duration": _Kind("s", "lower"),
    "rate": _Kind("1/s", "higher"),
    "latency": _Kind("s", "lower"),
    "memory": _Kind("B", "lower"),
    "ratio": _Kind("1", "higher"),
}


@dataclass(frozen=True)
class What:
    """The subject of a figure."""

    form: str
    """Of its name: ``loading.{state}.{engine}.{figure}``, with the figure and labels in braces. Its first part is the
    label ``subject``."""
    quantity: Quantity
    engine: str
    medium: str
    figure: str
    labels: Mapping[str, str] = field(default_factory=dict)
    """The names' parts in braces, and what tells figures of one name apart."""
    layer: str = "filesystem"
    parameters: Mapping[str, Scalar] = field(default_factory=dict)
    better: Better | None = None
    """None: as usual for the quantity."""
    rank: int | None = None
    host: str | None = None

    @property
    def name(self) -> str:
        """Made from the figure and its labels."""
        return self.form.format(figure=self.figure, **self.labels)


def figure(
    what: What,
    values: Sequence[float],
    moments: Sequence[float] = (),
    percentiles: Sequence[Mapping[str, float]] = (),
    evidence: Evidence | None = None,
) -> Measurement:
    """Of ``values``, which are not empty; ``moments`` and ``percentiles`` are empty, or have one for each value."""
    spread = spread_of(values, moments)
    middle = min(range(len(values)), key=lambda number: abs(values[number] - spread["value"]))
    shown = dict(percentiles[middle]) or None if percentiles else None
    return computed(what, spread.pop("value"), evidence=evidence, percentiles=shown, **spread)


def measured(
    what: What,
    stack: BlockStack,
    samples: Sequence[Sample],
    values: Sequence[float],
    percentiles: Sequence[Mapping[str, float]] = (),
) -> Measurement:
    """Of samples that devices of ``stack`` counted, each of which is worth one of ``values``."""
    evidence = summed(stack, [each.counted for each in samples], sum(each.claimed_bytes for each in samples))
    return figure(what, values, [each.moment for each in samples], percentiles, evidence)


def computed(what: What, value: float, interval: Estimate | None = None, **more: Any) -> Measurement:
    """Of one value, with an interval where there is one. ``more``: fields of a measurement."""
    unit, better = _KINDS[what.quantity]
    if interval is not None:
        more["confidence"] = _confidence(interval)
    return Measurement(
        name=what.name,
        figure=what.figure,
        labels={"subject": what.form.partition(".")[0], **what.labels},
        layer=what.layer,
        engine=what.engine,
        medium=what.medium,
        quantity=what.quantity,
        unit=unit,
        better=what.better or better,
        value=value,
        parameters=dict(what.parameters),
        rank=what.rank,
        host=what.host,
        **more,
    )


def spread_of(values: Sequence[float], moments: Sequence[float] = ()) -> dict[str, Any]:
    """The fields of a measurement that its samples decide: value, samples, confidence, trend."""
    interval = estimate(values)
    fields: dict[str, Any] = {"value": interval.value, "samples": list(values)}
    if (spread := _confidence(interval)) is not None:
        fields["confidence"] = spread
    if not moments:
        return fields
    change = drift(moments, values)
    trend = Trend(slope_per_second=change.slope_per_second, significant=change.significant, change=change.change)
    return {**fields, "trend": trend}


def _confidence(interval: Estimate) -> Confidence | None:
    """None for a single sample: from a value to the same value is no interval."""
    if not interval.level:
        return None
    return Confidence(level=interval.level, low=interval.low, high=interval.high, method=interval.method)
