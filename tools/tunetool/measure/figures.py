"""From fio's samples to the record's measurements, and to the reasons why a figure proves nothing."""

from __future__ import annotations

from statistics import median

from tunetool.measure.balance import service_times
from tunetool.measure.direction import Direction
from tunetool.measure.evidence import Counted, explain, summed, worst, wrong_clock
from tunetool.measure.fio import Fio
from tunetool.measure.sequential import FEWEST, Plan, Results, Sample
from tunetool.measure.statistics import drift, estimate
from tunetool.node.machine.block_stack import BlockStack
from tunetool.record import Confidence, Measurement, Scalar, Trend
from tunetool.verdict import CEILING

NAMES: dict[Direction, str] = {"read": "sequential.read", "write": "sequential.write"}


def bandwidths(stack: BlockStack, fio: Fio, shape: Plan, results: Results) -> list[Measurement]:
    """The sequential figures of every direction that was measured to its end."""
    return [
        _bandwidth(direction, samples, stack, fio, shape, results)
        for direction, samples in sorted(results.samples.items())
        if len(samples) >= FEWEST or _disproved(samples)
    ]


def _disproved(samples: list[Sample]) -> bool:
    """A claim that the drives deny ends a direction before it has all its samples."""
    return any(sample.counted is not None and sample.counted.judgement == "missing" for sample in samples)


def _bandwidth(
    direction: Direction,
    samples: list[Sample],
    stack: BlockStack,
    fio: Fio,
    shape: Plan,
    results: Results,
) -> Measurement:
    values = [sample.outcome.bandwidth for sample in samples]
    found = estimate(values)
    change = drift([sample.moment for sample in samples], values)
    middle = min(samples, key=lambda sample: abs(sample.outcome.bandwidth - found.value))
    parameters: dict[str, Scalar] = {
        "direction": direction,
        "block_bytes": 2**20,
        "queue_depth": 32,
        "jobs": shape.jobs,
        "io_engine": "libaio",
        "direct": results.direct,
        "file_bytes": results.file_bytes,
        "sample_seconds": shape.duration,
        "repeated_samples": results.repeated[direction].taken,
        "fio_path": fio.path,
    }
    return Measurement(
        name=NAMES[direction],
        layer="filesystem",
        engine=f"fio {fio.version}",
        medium=stack.medium,
        quantity="bandwidth",
        unit="B/s",
        better="higher",
        value=found.value,
        samples=values,
        confidence=Confidence(level=found.level, low=found.low, high=found.high, method=found.method),
        trend=Trend(slope_per_second=change.slope_per_second, significant=change.significant, change=change.change),
        percentiles=middle.outcome.percentiles or None,
        parameters=parameters,
        evidence=summed(stack, [each.counted for each in samples], sum(each.outcome.claimed_bytes for each in samples)),
    )


def service_time_figures(stack: BlockStack, results: Results) -> list[Measurement]:
    """What each drive took for a request: the figures behind the check ``drives.balance``."""
    found = []
    for direction, counted in counted_samples(results).items():
        rounds = [service_times(sample, direction) for sample in counted]
        for leaf in stack.leaves:
            values = [times[leaf.name] for times in rounds if leaf.name in times]
            if values:
                found.append(
                    Measurement(
                        name=f"drive.{direction}_time",
                        layer="device",
                        engine="block device counters",
                        medium="nvme disk" if leaf.kind == "nvme" else "disk",
                        quantity="latency",
                        unit="s",
                        better="lower",
                        value=median(values),
                        samples=values,
                        parameters={"direction": direction, "device": leaf.name, "serial": leaf.serial or ""},
                    )
                )
    return found


def ceiling_figure(stack: BlockStack, value: float) -> Measurement:
    """The links' ceiling, computed."""
    return Measurement(
        name=CEILING,
        layer="link",
        engine="computed from negotiated PCIe speed and width",
        medium=stack.medium,
        quantity="bandwidth",
        unit="B/s",
        better="higher",
        value=value,
        parameters={"drives": len(stack.leaves)},
    )


def counted_samples(results: Results) -> dict[Direction, list[Counted]]:
    """By direction, what the drives counted in each sample that was kept."""
    return {
        direction: [sample.counted for sample in samples if sample.counted is not None]
        for direction, samples in results.samples.items()
    }


def unproven(stack: BlockStack, results: Results) -> dict[str, str]:
    """By measurement name, why its samples prove nothing; empty when the counters agree."""
    reasons = {}
    for direction, counted in counted_samples(results).items():
        bad = [sample for sample in counted if sample.judgement != "proven"]
        if bad:
            reasons[NAMES[direction]] = explain(stack, direction, worst(bad))
    for direction, samples in results.samples.items():
        wrong = wrong_clock((sample.counted, sample.outcome.seconds) for sample in samples)
        if wrong:
            reasons.setdefault(NAMES[direction], wrong)
    if not results.direct:
        for direction in results.samples:
            reasons.setdefault(
                NAMES[direction],
                f"the file system of `{stack.directory}` takes no direct I/O: the page cache answers",
            )
    return reasons
