"""What `bench ds-io` found, for people, in the words of `ds_io` where it has words."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from tunetool.node.units import format_bandwidth, format_size_binary
from tunetool.record import Measurement, Record
from tunetool.report.page import print_block
from tunetool.report.table import print_verdict_line


def print_ds_io(record: Record, path: Path | None, console: Console) -> None:
    """The figures with their evidence, then what speaks against them."""
    console.print(Text(f"{record.node.host}: `{record.target}`"), soft_wrap=True)
    for measurement in record.measurements:
        print_block(console, _figure(measurement), 2)
    if record.measurements:
        print_block(console, _how(record.measurements[0]), 2)
    print_verdict_line(record, path, console)


def _figure(measurement: Measurement) -> str:
    durable = measurement.name.endswith("_durable")
    spoken = str(measurement.parameters["direction"]).capitalize() + (" Speed, synced" if durable else " Speed")
    interval, count = measurement.confidence, len(measurement.samples or [])
    spread = f", {interval.low / 1e9:.4g} to {interval.high / 1e9:.4g} in {count} loops" if interval else ""
    return f"{spoken} = {format_bandwidth(measurement.value)}{spread}"


def _how(measurement: Measurement) -> str:
    told = measurement.parameters
    evidence = measurement.evidence
    proof = f"evidence: {evidence.kind} {evidence.ratio:.4f}" if evidence and evidence.ratio else "evidence: none"
    return (
        f"{measurement.engine}; {format_size_binary(float(told['file_bytes']))} on {measurement.medium}, blocks of "
        f"{format_size_binary(float(told['block_bytes']))}, depth {told['queue_depth']}, "
        f"parallel {told['intra_op_parallelism']}; {proof}"
    )
