"""The result of `bench ds-io` for people, in the format of DeepSpeed's `ds_io` where it has one."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from tunetool.bench.ds_io import DURABLE
from tunetool.node.units import format_bandwidth, format_size_binary
from tunetool.record import Measurement, Record, chosen
from tunetool.report.page import print_block
from tunetool.report.table import print_verdict_line


def print_ds_io(record: Record, path: Path | None, console: Console) -> None:
    """Print the figures with their evidence, then the verdict. ``path``: where the record is."""
    console.print(Text(f"{record.node.host}: `{record.target}`"), soft_wrap=True)
    figures = figures_of(record)
    for measurement in figures:
        print_block(console, _figure(measurement), 2)
    if figures:
        print_block(console, _how(figures[0]), 2)
    print_verdict_line(record, path, console)


def figures_of(record: Record) -> list[Measurement]:
    """What the handle reached; not the ceiling of the links."""
    return chosen(record.measurements, subject="ds_io")


def _figure(measurement: Measurement) -> str:
    durable = measurement.figure == DURABLE
    label = str(measurement.parameters["direction"]).capitalize() + (" Speed, synced" if durable else " Speed")
    interval, count = measurement.confidence, len(measurement.samples or [])
    spread = f", {interval.low / 1e9:.4g} to {interval.high / 1e9:.4g} in {count} loops" if interval else ""
    return f"{label} = {format_bandwidth(measurement.value)}{spread}"


def _how(measurement: Measurement) -> str:
    parameters = measurement.parameters
    evidence = measurement.evidence
    proof = f"evidence: {evidence.kind} {evidence.ratio:.4f}" if evidence and evidence.ratio else "evidence: none"
    return (
        f"{measurement.engine}; {format_size_binary(float(parameters['file_bytes']))} on {measurement.medium}, "
        f"blocks of {format_size_binary(float(parameters['block_bytes']))}, depth {parameters['queue_depth']}, "
        f"parallel {parameters['intra_op_parallelism']}; {proof}"
    )
