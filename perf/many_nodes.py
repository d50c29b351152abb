"""What a fleet of a thousand nodes costs the control machine: one verdict of their records, what differs between them,
and the time that `verify -i` takes for each further node.

    .venv/bin/python perf/many_nodes.py [--nodes 1000] [--many 64] [--seconds 20]

Records are one with other names: sixteen drives, 42 figures of six samples, 21 checks. One verdict is made in a
process of its own, whose peak memory counts. Inspections are of docs/machines/h100-made.json, every fiftieth with
another kernel, every hundredth with a slow link; seconds of the CPU of one thread. The hosts of `verify -i` are this
machine: each sleeps, as a measurement does on a node, and prints such a record; over ssh the Python of a small module
does not run here.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from rounds import Arm, Sample, apart, output, program, sample
from tunetool import record as records
from tunetool.fleet.playbook import HostSelection
from tunetool.fleet.run_on_hosts import host_result
from tunetool.fleet.verify import FleetRequest, fleet_record, name_outliers
from tunetool.inspect.collect import inspect
from tunetool.inspect.fleet_compare import compare
from tunetool.inspect.model import Inspection
from tunetool.inspect.source import opened
from tunetool.record import Record
from tunetool.report.page import WIDTH
from tunetool.report.table import print_fleet

ROOT = Path(__file__).resolve().parents[1]
MACHINE, RECORD = ROOT / "docs/machines/h100-made.json", ROOT / "tests/data/records/verify.json"


def node_record(number: int, source: random.Random) -> Record:
    """As a node of sixteen drives sends it."""
    one = records.read(RECORD)
    figures = [each.model_copy(update={"value": each.value * (1 + source.random() / 50)}) for each in one.measurements]
    drives = [
        drive.model_copy(update={"serial": f"{drive.serial}-{number}-{half}"})
        for half in range(2)
        for drive in one.node.drives or []
    ]
    node = one.node.model_copy(update={"host": f"node{number:04d}", "drives": drives})
    more = {"id": records.new_id(), "node": node, "measurements": figures * 2, "checks": one.checks * 3}
    return one.model_copy(update=more)


def aggregate(nodes: int) -> float:
    """Seconds from Ansible's results to the fleet's record on disk and its table."""
    source, events = random.Random(1), dict[str, dict[str, Any]]()
    for number in range(nodes):
        made = node_record(number, source)
        events[made.node.host] = {"host": made.node.host, "res": {"record": records.to_document(made)}}
    began = time.perf_counter()
    hosts = name_outliers([host_result(name, event) for name, event in events.items()])
    fleet = fleet_record(FleetRequest(HostSelection(Path("inventory"))), hosts, records.utc_now())
    with tempfile.TemporaryDirectory() as directory:
        kept = {f"hosts/{at.host}.json": records.dumps(each, compact=True) for at, each in hosts if each is not None}
        records.write(fleet, Path(directory), kept)
    print_fleet(hosts, Console(file=io.StringIO(), width=WIDTH))
    return time.perf_counter() - began


def inspections(count: int) -> dict[str, Inspection]:
    with opened(MACHINE) as source:
        text = inspect(source).model_dump_json(by_alias=True)
    made = {}
    for number in range(count):
        # Parsed one by one, as they arrive: nothing is shared between hosts.
        each = Inspection.model_validate_json(text)
        if number % 50 == 0:
            each = each.model_copy(update={"host": each.host.model_copy(update={"kernel": "6.8.0"})})
        if number % 100 == 0:
            link = each.drives[-1].link.model_copy(update={"speed_gts": 16.0})
            each = each.model_copy(
                update={"drives": [*each.drives[:-1], each.drives[-1].model_copy(update={"link": link})]}
            )
        made[f"n{number}"] = each
    return made


def beyond(folder: Path, nodes: int, seconds: float) -> float:
    """Seconds that `verify -i` took beyond what each of its nodes took."""
    hosts, source = {}, random.Random(1)
    for number in range(nodes):
        command = (home := folder / f"node{number:04d}") / "bin/tunetool"
        command.parent.mkdir(parents=True)
        (home / "record.json").write_text(records.dumps(node_record(number, source), compact=True))
        command.write_text(f"#!/bin/sh\nsleep {seconds}\ncat {home}/record.json\n")
        command.chmod(0o755)
        hosts[home.name] = {"tunetool_prefix": str(home)}
    here = {"ansible_connection": "local", "ansible_become": False, "ansible_python_interpreter": sys.executable}
    (inventory := folder / "hosts.json").write_text(json.dumps({"all": {"vars": here, "hosts": hosts}}))
    began, verify = time.monotonic(), Path(sys.executable).with_name("tunetool")
    output(verify, "verify", "-i", inventory, "--runs-dir", folder / "runs", codes=(0, 1))
    return time.monotonic() - began - seconds


def prepare(asked: argparse.Namespace, folder: Path, _: ExitStack) -> dict[str, Arm]:
    made = inspections(asked.nodes)

    def verdict() -> Iterable[Sample]:
        seconds, peak = apart(aggregate, asked.nodes)
        yield sample("time", seconds, part="one verdict")
        yield sample("memory", peak, part="one verdict")

    def differences() -> Iterable[Sample]:
        began = time.process_time()
        found = compare(made)
        yield sample("cpu", time.process_time() - began, part="what differs")
        facts = [each.fact for each in found.differences]
        if facts != ["drives.link", "host.kernel"]:
            raise RuntimeError(f"wrong differences: {facts}")

    def fan_out() -> Iterable[Sample]:
        taken = []
        for nodes in (1, asked.many):
            with tempfile.TemporaryDirectory(dir=folder) as each:
                taken.append(beyond(Path(each), nodes, asked.seconds))
        yield sample("time", taken[0], part="verify -i of one node, beyond its own")
        yield sample("time", (taken[1] - taken[0]) / max(1, asked.many - 1), part="each further node")

    return {"verdict": verdict, "differences": differences, "fan-out": fan_out}


if __name__ == "__main__":
    program(prepare, nodes=1000, many=64, seconds=20)
