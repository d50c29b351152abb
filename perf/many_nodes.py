"""The time that `verify -i` takes for each further node.

    .venv/bin/python perf/many_nodes.py [--many 64] [--seconds 20]

The hosts are this machine: each sleeps, as a measurement does on a node, and prints a record of sixteen drives, 42
figures of six samples and 21 checks; over ssh the Python of a small module does not run here.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

from rounds import Arms, Call, Samples, output, program, sample, timed
from tunetool import record as records
from tunetool.record import Record

RECORD = Path(__file__).resolve().parents[1] / "tests/data/records/verify.json"


def node_record(host: str) -> Record:
    """As a node of sixteen drives sends it."""
    one = records.read(RECORD)
    drives = [
        drive.model_copy(update={"serial": f"{drive.serial}-{host}-{half}"})
        for half in range(2)
        for drive in one.node.drives or []
    ]
    node = one.node.model_copy(update={"host": host, "drives": drives})
    more = {"id": records.new_id(), "node": node, "measurements": one.measurements * 2, "checks": one.checks * 3}
    return one.model_copy(update=more)


def beyond(scratch: Path, nodes: int, seconds: float) -> float:
    """Seconds that `verify -i` took beyond what each of its nodes took."""
    hosts, folder = {}, Path(tempfile.mkdtemp(dir=scratch))
    for number in range(nodes):
        command = (home := folder / f"node{number:04d}") / "bin/tunetool"
        command.parent.mkdir(parents=True)
        (home / "record.json").write_text(records.dumps(node_record(home.name), compact=True))
        command.write_text(f"#!/bin/sh\nsleep {seconds}\ncat {home}/record.json\n")
        command.chmod(0o755)
        hosts[home.name] = {"tunetool_prefix": str(home)}
    here = {"ansible_connection": "local", "ansible_become": False, "ansible_python_interpreter": sys.executable}
    (inventory := folder / "hosts.json").write_text(json.dumps({"all": {"vars": here, "hosts": hosts}}))
    verify = [Path(sys.executable).with_name("tunetool"), "verify", "-i", inventory, "--runs-dir", folder / "runs"]
    return timed(partial(output, *verify, codes=(0, 1)))[1] - seconds


def prepare(call: Call) -> Arms:
    def fan_out() -> Samples:
        one, many = (beyond(call.folder, nodes, call.asked.seconds) for nodes in (1, call.asked.many))
        yield sample("time", one, part="verify -i of one node, beyond its own")
        yield sample("time", (many - one) / max(1, call.asked.many - 1), part="each further node")

    return {"fan-out": fan_out}


if __name__ == "__main__":
    program(prepare, many=64, seconds=20)
