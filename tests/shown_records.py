"""Records with something to show on their pages: a node whose ladder has a loss, a fleet with bad nodes, hostile texts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import builders
from tunetool import record as records
from tunetool.fleet.verify import name_outliers
from tunetool.measure.ladder.causes import DriveFacts as LadderDrive
from tunetool.measure.ladder.causes import Facts
from tunetool.measure.ladder.climb import conclude
from tunetool.record import (
    CheckResult,
    DriveFacts,
    Evidence,
    Expectation,
    FleetHost,
    Link,
    Measurement,
    Node,
    Record,
    Tool,
    Verdict,
)
from tunetool.verdict import CEILING

GB = 10**9
MEDIUM = "md RAID0 (8 x nvme)"
COUNTED = Evidence(kind="block", device="md0", claimed_bytes=10**12, counted_bytes=10**12 + 10**8, ratio=1.0001)
TOOL = Tool(version="0.1.0", commit="c" * 40, source_sha256="5" * 64)


def node(host: str = "node1", kernel: str = "6.8.0", drives: int = 8) -> Node:
    return Node(
        host=host,
        kernel=kernel,
        machine="Supermicro AS-8125GS",
        cpu="AMD EPYC 9654",
        cpu_count=192,
        memory_bytes=2 * 2**40,
        driver="580.65",
        drives=[
            DriveFacts(
                name=f"nvme{n}n1",
                serial=f"S{n:03d}",
                model="KCD8XPUG7T68",
                firmware="0106",
                size_bytes=7_680_000_000_000,
                pci_address=f"0000:{n:02x}:00.0",
                link=Link(current_speed_gts=32.0, current_width=4, max_speed_gts=32.0, max_width=4),
            )
            for n in range(drives)
        ],
    )


def figure(name: str, value: float, spread: float = 0.03, **fields: Any) -> Measurement:
    source = random.Random(name)
    samples = [value * (1 + spread * (source.random() - 0.5)) for _ in range(6)]
    return builders.sampled(name, *samples, **{"medium": MEDIUM, "evidence": COUNTED, **fields})


def rates() -> list[Measurement]:
    sizes = (("1m", 45_000, 2**20), ("64k", 600_000, 2**16), ("4k", 5_200_000, 2**12))
    return [
        figure(
            f"random.read.{size}",
            rate,
            quantity="rate",
            unit="1/s",
            percentiles={"p50": 9e-5, "p99": 0.0012, "p99.9": 0.011},
            parameters={"direction": "read", "block_bytes": block, "jobs": 16, "queue_depth": 64},
        )
        for size, rate, block in sizes
    ]


def verified(slow: float = 2.1) -> Record:
    """One node at level full, whose sixth drive reads ``slow`` GB/s."""
    speeds = [7.0, 6.98, 7.02, 6.99, 7.01, slow, 7.0, 6.97]
    alone = [
        figure("drive.read", speed * GB, medium="nvme disk", parameters={"serial": f"S{n:03d}", "device": f"nvme{n}n1"})
        for n, speed in enumerate(speeds)
    ]
    stripe = 8 * min(speeds)
    together = [
        figure(
            f"drives.read.{count}",
            min(speeds[:count]) * count * 0.98 * GB,
            parameters={"drives": count, "sum_alone": sum(speeds[:count]) * GB},
        )
        for count in (2, 4, 8)
    ]
    upper = {
        "array.read": 0.99 * stripe,
        "sequential.read": 0.97 * stripe,
        "sequential.write": 0.5 * stripe,
        "sequential.read.io_uring": 0.96 * stripe,
        "sequential.write.io_uring": 0.5 * stripe,
        "sustained.write": 0.48 * stripe,
    }
    above = [
        figure(name, value * GB, parameters={"direction": "write" if "write" in name else "read"})
        for name, value in upper.items()
    ]
    measured = [*alone, *together, *above, *rates()]
    known = [LadderDrive(f"S{n:03d}", f"nvme{n}n1", speed * GB) for n, speed in enumerate(speeds)]
    ladder = conclude(measured, {"checkpoint.load": "no torch"}, {}, lambda: Facts(known, cores=192))
    fails = slow < 6
    reason = "sequential read 16.3 GB/s [16.1 to 16.5] is below 50.0 GB/s: `S005` reads 2.1 GB/s alone; replace it"
    return builders.record(
        builders.measurement(CEILING, 63 * GB, layer="link", parameters={"drives": 8}),
        *measured,
        node=node(),
        tool=TOOL,
        command=["tunetool", "verify", "--level", "full", "--expect", "50GBps"],
        target="/mnt/nvme_raid0",
        tolerance=0.05,
        expectations=builders.wanted_read("fail" if fails else "pass"),
        checks=[
            *(check(f"array.{name}", "pass") for name in ("assembled", "state", "members", "chunk", "initramfs")),
            check("drives.balance", "fail" if fails else "pass", "`S005` 3.4x slower to read than the others"),
            check("training.environment", "skip", "the role is off"),
        ],
        ladder=ladder,
        verdict=Verdict(status="fail" if fails else "pass", reasons=[reason] if fails else []),
    )


def check(name: str, status: str, found: str = "as it was built") -> CheckResult:
    remedy = "look at `/dev/nvme5n1`: `nvme smart-log`; replace it if it stays slow" if status == "fail" else ""
    fields = {"id": name, "status": status, "expected": "what the manifest has", "found": found, "remedy": remedy}
    return CheckResult.model_validate(fields)


def fleet(count: int = 40) -> tuple[Record, dict[str, Node], dict[str, list[str]]]:
    """A fleet with one failed node, one that gave no record, and some slow ones; its machines, and its racks."""
    source = random.Random(7)
    hosts: list[tuple[FleetHost, Record | None]] = []
    nodes = {}
    for number in range(1, count + 1):
        name = f"node{number:04d}"
        if number == 9:
            hosts.append(
                (FleetHost(host=name, status="error", reasons=["Failed to connect to the host via ssh"]), None)
            )
            continue
        speed = (51 + source.random()) * GB * (0.6 if number in (7, 23) else 1)
        reasons = ["array.state: degraded, expected clean: replace `S003`"] if number == 17 else []
        status = "fail" if reasons else "pass"
        nodes[name] = node(name, "6.8.0-odd" if number == 5 else "6.8.0", 7 if number == 17 else 8)
        figures = [
            figure(f"sequential.{direction}", speed * share, parameters={"direction": direction})
            for direction, share in (("read", 1.0), ("write", 0.5))
        ]
        made = builders.record(*figures, node=nodes[name], verdict=Verdict(status=status, reasons=reasons))
        hosts.append((FleetHost(host=name, record_id=made.id, status=status, reasons=reasons), made))
    named = name_outliers(hosts)
    figures = [
        each.model_copy(update={"host": host.host})
        for host, made in named
        for each in (made.measurements if made else [])
    ]
    reasons = [f"{host.host}: {host.reasons[0]}" for host, _ in named if host.status != "pass"]
    whole = builders.record(
        *figures,
        kind="fleet",
        tool=TOOL,
        command=["tunetool", "verify", "-i", "inventory/mycluster"],
        expectations=[Expectation(name="sequential.read", value=50e9, source="--expect")],
        hosts=[host for host, _ in named],
        verdict=Verdict(status="fail", reasons=reasons),
    )
    return whole, nodes, {host.host: [f"rack{number % 4 + 1}"] for number, (host, _) in enumerate(hosts)}


TEXTS = {
    *("found", "expected", "remedy", "medium", "engine", "host", "target", "model", "firmware", "kernel", "machine"),
    *("cpu", "driver", "title", "method", "serial", "source", "below", "commit", "name", "rung", "device"),
}
"""Keys of a record whose values are texts of other programs or of people."""


def hostile(record: Record, text: str) -> Record:
    """The record with ``text`` after the beginning of whatever a stranger could have written."""

    def spoiled(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: spoiled(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [spoiled(inner, key) for inner in value]
        return f"{value}{text}" if isinstance(value, str) and key in {*TEXTS, "reasons", "command"} else value

    document = records.to_document(record)
    del document["sha256"]
    # The names of figures choose what a page shows of them.
    kept = [each["name"] for each in document.get("measurements", [])]
    document = spoiled(document)
    for each, name in zip(document.get("measurements", []), kept, strict=True):
        each["name"] = name
    return Record.model_validate(document)


def all_kinds() -> Sequence[Record]:
    """A record of each kind whose page needs nothing else."""
    tuned = [
        figure(f"tune.{name}.read", value * GB, parameters={"direction": "read"})
        for name, value in (("best", 48.0), ("default", 21.0))
    ]
    return [
        verified(),
        fleet(12)[0],
        builders.record(*tuned, kind="tune", verdict=Verdict(status="pass", reasons=[])),
        builders.record(figure("stage.copy", 12 * GB), kind="stage", checks=[check("stage.identical", "pass")]),
    ]
