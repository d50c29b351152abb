"""Drives, measurements and records to start from: a test states only the fields that it is about."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from tunetool.measure.figure import Quantity, What, computed, spread_of
from tunetool.node.machine.drives import Drive, Link
from tunetool.record import CheckResult, CheckStatus, Evidence, Expectation, Measurement, Node, Record, Status
from tunetool.record_v1 import figure_of, labels_of_check

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
PROVEN = Evidence(kind="block", device="md0", claimed_bytes=100, counted_bytes=100, ratio=1.0003)


def nvme_drive(number: int, **fields: Any) -> Drive:
    """An NVMe drive of 4 GiB that nothing uses; ``fields`` are those that differ."""
    plain = Drive(
        name=f"nvme{number}n1",
        serial=f"S{number}",
        model="QEMU NVMe Ctrl",
        firmware="1",
        size_bytes=2**32,
        lba_bytes=512,
        metadata_bytes=0,
        transport="pcie",
        pci_address=f"0000:{number:02x}:00.0",
        numa_node=None,
        by_id=None,
        link=Link(),
    )
    return replace(plain, **fields)


def measurement(name: str, value: float, quantity: Quantity = "bandwidth", **fields: Any) -> Measurement:
    """A figure by fio on a disk; ``fields`` are those that differ."""
    figure, labels = figure_of(name, fields.get("parameters") or {})
    made = computed(What(name, quantity, "fio 3.33", "disk", figure), value)
    return Measurement.model_validate({**dict(made), "labels": labels, **fields})


def check(id_: str, status: CheckStatus, found: str = "", expected: str = "", **fields: Any) -> CheckResult:
    """A check with the labels that its id says."""
    return CheckResult(id=id_, labels=labels_of_check(id_), status=status, expected=expected, found=found, **fields)


def sampled(name: str, *values: float, **fields: Any) -> Measurement:
    """A bandwidth with one sample per second, and their median, interval and trend."""
    spread = spread_of(values, [float(number) for number in range(len(values))])
    return measurement(name, **{**spread, **fields})


def record(*measurements: Measurement, **fields: Any) -> Record:
    """A record of one node without a verdict; ``fields`` are those that differ."""
    fixed = {"kind": "verify", "id": "0" * 32, "started": NOW, "finished": NOW, "node": Node(host="n1"), "command": []}
    return Record.model_validate({**fixed, "measurements": list(measurements), **fields})


def wanted_read(status: Status) -> list[Expectation]:
    """The expectation of 50 GB/s of sequential reads, judged as ``status``."""
    return [Expectation(name="sequential.read", value=50e9, source="--expect", status=status)]
