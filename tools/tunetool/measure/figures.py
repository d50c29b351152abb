"""Makes the record's measurements from fio's samples and of the links' ceiling, and the reasons why a figure proves
nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from tunetool.measure import Direction, tester
from tunetool.measure.balance import service_times
from tunetool.measure.evidence import Counted, doubt, wrong_clock
from tunetool.measure.figure import What, computed, measured
from tunetool.measure.fio import Fio
from tunetool.measure.metrics import SEQUENTIAL
from tunetool.measure.sequential import FEWEST, Plan, Results, Sample
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.machine.drives import Drive, read_drives
from tunetool.node.machine.pcie_links import link_bandwidth
from tunetool.record import Measurement, Scalar
from tunetool.verdict import CEILING, DIRECTORY, DRIVES

NAMES: dict[Direction, str] = {each.direction: each.name for each in SEQUENTIAL}


def bandwidths(stack: BlockStack, fio: Fio, shape: Plan, results: Results) -> list[Measurement]:
    """The sequential figures of every direction that was measured to its end."""
    return [
        _bandwidth(direction, samples, stack, fio, shape, results)
        for direction, samples in sorted(results.samples.items())
        if len(samples) >= FEWEST or _disproved(samples)
    ]


def of_volumes(stack: BlockStack, fio: Fio, shape: Plan, results: Results) -> tuple[list[Measurement], dict[str, str]]:
    """The same of each of several volumes while all were measured, and by name why samples of one prove nothing."""
    measurements, reasons = [], {}
    own = replace(shape, jobs=shape.jobs_each, volumes=())
    for name, part in zip(shape.volumes, stack.parts, strict=False):
        alone = results.of_volume(name)
        where: dict[str, Scalar] = {**_drives(part), DIRECTORY: part.directory}
        for each in bandwidths(part, fio, own, alone):
            measurements.append(of_volume(each.model_copy(update={"parameters": {**each.parameters, **where}}), name))
        reasons.update({f"{figure}.{name}": why for figure, why in unproven(part, alone).items()})
    return measurements, reasons


def _drives(stack: BlockStack) -> dict[str, Scalar]:
    """By what the verdict knows the share of each of several volumes."""
    return {DRIVES: ", ".join(leaf.label for part in stack.parts or (stack,) for leaf in part.leaves)}


def of_volume(measurement: Measurement, name: str) -> Measurement:
    """The figure as that of one of several volumes."""
    labels = {**measurement.labels, "volume": name}
    return measurement.model_copy(update={"name": f"{measurement.name}.{name}", "labels": labels})


def is_sequential(measurement: Measurement) -> bool:
    """Whether it is one of these figures of all volumes together; those by io_uring are of the ladder."""
    return measurement.labels["subject"] == "sequential" and not {"io_engine", "volume"} & set(measurement.labels)


def is_share(measurement: Measurement) -> bool:
    """Whether it is what one of several volumes gave to such a figure."""
    return measurement.labels["subject"] == "sequential" and "volume" in measurement.labels


def sequential_figures(measurements: Iterable[Measurement]) -> dict[Direction, Measurement]:
    """These figures by direction: of one host."""
    directions: tuple[Direction, ...] = ("read", "write")
    mine = {each.labels["direction"]: each for each in measurements if is_sequential(each)}
    return {direction: mine[direction] for direction in directions if direction in mine}


def _disproved(samples: list[Sample]) -> bool:
    """Whether a claim that the drives contradict ended the direction early."""
    return any(sample.counted is not None and sample.counted.judgement == "missing" for sample in samples)


def _bandwidth(
    direction: Direction,
    samples: list[Sample],
    stack: BlockStack,
    fio: Fio,
    shape: Plan,
    results: Results,
) -> Measurement:
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
        **(_drives(stack) if stack.parts else {}),
        **tester.limits([sample.outcome for sample in samples], results.ceilings.get(direction, []), shape.jobs),
    }
    return measured(
        What(
            "sequential.{direction}",
            "bandwidth",
            f"fio {fio.version}",
            stack.medium,
            "bandwidth",
            {"direction": direction},
            parameters=parameters,
        ),
        stack,
        samples,
        [sample.outcome.bandwidth for sample in samples],
        [sample.outcome.percentiles for sample in samples],
    )


def service_time_figures(stack: BlockStack, results: Results) -> list[Measurement]:
    """What each drive took for a request: the figures behind the check ``drives.balance``."""
    figures = []
    for direction, counted in counted_samples(results).items():
        rounds = [service_times(sample, direction) for sample in counted]
        for leaf in stack.leaves:
            values = [times[leaf.name] for times in rounds if leaf.name in times]
            if values:
                details: dict[str, Scalar] = {
                    "direction": direction,
                    "device": leaf.name,
                    "serial": leaf.serial or "",
                }
                medium = "nvme disk" if leaf.kind == "nvme" else "disk"
                what = What(
                    "drive.{direction}_time",
                    "latency",
                    "block device counters",
                    medium,
                    "service_time",
                    {"direction": direction, "drive": leaf.label},
                    "device",
                    details,
                )
                figures.append(computed(what, median(values), samples=values))
    return figures


def ceiling_figure(stack: BlockStack, value: float) -> Measurement:
    """The links' ceiling, computed."""
    engine = "computed from negotiated PCIe speed and width"
    labels, drives = {"layer": "link"}, {"drives": len(stack.leaves)}
    what = What(CEILING, "bandwidth", engine, stack.medium, "ceiling", labels, "link", drives)
    return computed(what, value)


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
        reason = doubt(stack, direction, counted)
        if reason:
            reasons[NAMES[direction]] = reason
    for direction, samples in results.samples.items():
        wrong = wrong_clock((sample.counted, sample.outcome.seconds) for sample in samples)
        if wrong:
            reasons.setdefault(NAMES[direction], wrong)
    if not results.direct:
        for direction in results.samples:
            reasons.setdefault(
                NAMES[direction],
                f"the file system of `{stack.directory}` supports no direct I/O: the page cache answers",
            )
    return reasons


def ceiling_figures(stack: BlockStack) -> list[Measurement]:
    """The ceiling of this machine's drives below ``stack`` for a record; none where a link is not visible."""
    limit = ceiling(stack, read_drives())
    return [] if limit is None else [ceiling_figure(stack, limit)]


def ceiling(stack: BlockStack, drives: Sequence[Drive]) -> float | None:
    """The sum over the leaves of ``stack``; None unless the link of every one of them is known."""
    by_name: Mapping[str, Drive] = {drive.name: drive for drive in drives}
    total = 0.0
    for leaf in stack.leaves:
        drive = by_name.get(leaf.name)
        bandwidth = link_bandwidth(drive.link) if drive else None
        if bandwidth is None:
            return None
        total += bandwidth
    return total or None
