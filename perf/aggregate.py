"""How long and how much memory it takes to make one verdict of a thousand nodes' records.

    .venv/bin/python perf/aggregate.py [--nodes 1000] [--rounds 5]

The records are generated: sixteen drives, twenty checks, six samples of each figure, as a node sends them. Each round
is a process of its own, whose peak memory is its alone. Ends with 1 where a goal is missed, else with 3 where one is
not decided.
"""

from __future__ import annotations

import argparse
import io
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from entry import program
from goals import line, status
from tunetool import record as records
from tunetool.fleet.playbook import HostSelection
from tunetool.fleet.run_on_hosts import host_result
from tunetool.fleet.verify import FleetRequest, fleet_record, name_outliers
from tunetool.record import (
    CheckResult,
    Confidence,
    DriveFacts,
    Evidence,
    Expectation,
    Measurement,
    Node,
    Record,
    Trend,
    Verdict,
)
from tunetool.report.page import WIDTH
from tunetool.report.table import print_fleet

SECONDS, MEGABYTES = 5.0, 500.0
"""Limits for the aggregation of a thousand records."""


def node_record(number: int, source: random.Random) -> Record:
    figures = []
    for name, direction, count in (
        ("sequential.read", "read", 1),
        ("sequential.write", "write", 1),
        ("drive.read_time", "read", 16),
        ("drive.write_time", "write", 16),
    ):
        for drive in range(count):
            samples = sorted(50e9 + source.random() * 1e9 for _ in range(6))
            figures.append(
                Measurement(
                    name=name,
                    figure="bandwidth" if count == 1 else "service_time",
                    labels={
                        "subject": name.partition(".")[0],
                        "direction": direction,
                        "drive": f"S{number:05d}{drive:02d}",
                    },
                    layer="filesystem" if count == 1 else "device",
                    engine="fio 3.33",
                    medium="md RAID0 (16 x nvme)",
                    quantity="bandwidth" if count == 1 else "latency",
                    unit="B/s" if count == 1 else "s",
                    better="higher",
                    value=statistics.median(samples),
                    samples=samples,
                    confidence=Confidence(level=0.97, low=samples[0], high=samples[-1], method="range of 6 samples"),
                    trend=Trend(slope_per_second=0, significant=False, change=0),
                    parameters={"direction": direction, "jobs": 16, "serial": f"S{number:05d}{drive:02d}"},
                    evidence=Evidence(kind="block", claimed_bytes=10**12, counted_bytes=10**12, ratio=1.0),
                )
            )
    return Record(
        kind="verify",
        id=records.new_id(),
        started=records.utc_now(),
        finished=records.utc_now(),
        node=Node(
            host=f"node{number:04d}",
            drives=[
                DriveFacts(name=f"nvme{drive}n1", serial=f"S{number:05d}{drive:02d}", model="MODEL")
                for drive in range(16)
            ],
        ),
        command=["tunetool", "verify"],
        target="/mnt/nvme_raid0",
        expectations=[Expectation(name="sequential.read", value=50e9, source="manifest", status="pass")],
        measurements=figures,
        checks=[
            CheckResult(id=f"check.{index}", status="pass", expected="as built", found="as built")
            for index in range(20)
        ],
        verdict=Verdict(status="pass", reasons=[]),
    )


def aggregate(events: dict[str, dict[str, Any]]) -> float:
    """Seconds from Ansible's results to the fleet's record on disk and its table."""
    began = time.perf_counter()
    hosts = name_outliers([host_result(name, event) for name, event in events.items()])
    record = fleet_record(FleetRequest(HostSelection(Path("inventory"))), hosts, records.utc_now())
    with tempfile.TemporaryDirectory() as directory:
        raw = {
            f"hosts/{host.host}.json": records.dumps(host_record, compact=True)
            for host, host_record in hosts
            if host_record is not None
        }
        records.write(record, Path(directory), raw)
    print_fleet(hosts, Console(file=io.StringIO(), width=WIDTH))
    return time.perf_counter() - began


def once(nodes: int) -> None:
    source = random.Random(1)
    events = {}
    for number in range(nodes):
        record = node_record(number, source)
        events[record.node.host] = {"host": record.node.host, "res": {"record": records.to_document(record)}}
    seconds = aggregate(events)
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        once(options.nodes)
        return 0
    samples = []
    for _ in range(options.rounds):
        command = [sys.executable, __file__, "--once", "--nodes", str(options.nodes)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        samples.append([float(word) for word in done.stdout.split()])
    seconds, megabytes = zip(*samples, strict=True)
    words = [line(f"{options.nodes} records: seconds", seconds, SECONDS, at_least=False)]
    words.append(line(f"{options.nodes} records: MB of peak memory", megabytes, MEGABYTES, at_least=False))
    return status(words)


if __name__ == "__main__":
    program(main)
