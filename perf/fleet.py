"""What `tunetool verify -i` costs the control machine for each node: wall time beyond that of the slowest node.

    .venv/bin/python perf/fleet.py [--nodes 16] [--seconds 20] [--rounds 3]

The hosts are this machine over a local connection, and their `tunetool` is a script that sleeps and then prints a
generated record: a node's own work costs the control machine nothing, as over ssh. What is measured too, and is not so
over ssh, is the Python of one small module for each host.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from aggregate import node_record
from entry import program
from goals import line, status
from tunetool import record as records

ALLOWED = 0.1
"""Seconds a node, on a control machine with a core for each few forks."""


def lay_out(directory: Path, nodes: int, seconds: float) -> Path:
    """An inventory of ``nodes`` hosts, each with a program of its own."""
    source = random.Random(1)
    hosts = {}
    for number in range(nodes):
        home = directory / f"node{number:04d}"
        (home / "bin").mkdir(parents=True)
        (home / "record.json").write_text(records.dumps(node_record(number, source), compact=True))
        program = home / "bin/tunetool"
        program.write_text(f"#!/bin/sh\nsleep {seconds}\ncat {home}/record.json\n")
        program.chmod(0o755)
        hosts[home.name] = {"tunetool_prefix": str(home)}
    variables = {"ansible_connection": "local", "ansible_become": False, "ansible_python_interpreter": sys.executable}
    inventory = directory / "hosts.json"
    inventory.write_text(json.dumps({"all": {"vars": variables, "hosts": hosts}}))
    return inventory


def beyond(directory: Path, nodes: int, seconds: float) -> float:
    """Seconds that one run took beyond what each of its nodes took."""
    inventory = lay_out(directory, nodes, seconds)
    started = time.monotonic()
    done = subprocess.run(
        [Path(sys.executable).parent / "tunetool", "verify", "-i", inventory, "--runs-dir", directory / "runs"],
        capture_output=True,
        text=True,
        check=False,
    )
    if f"{nodes} host" not in done.stderr or done.returncode not in (0, 1):
        raise SystemExit(f"error: `tunetool verify` ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return time.monotonic() - started - seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    excess: dict[int, list[float]] = {nodes: [] for nodes in sorted(set(options.nodes))}
    for _ in range(options.rounds):
        for nodes, runs in excess.items():
            with tempfile.TemporaryDirectory() as directory:
                runs.append(beyond(Path(directory), nodes, options.seconds))
    for nodes, runs in excess.items():
        print(
            f"{nodes} nodes: {statistics.median(runs):.1f} s beyond a node's own [{min(runs):.1f} to {max(runs):.1f}]"
        )
    few, many = min(excess), max(excess)
    if many == few:
        return 0
    slopes = [(more - less) / (many - few) for less, more in zip(excess[few], excess[many], strict=True)]
    return status([line(f"seconds for each node from {few} to {many}", slopes, ALLOWED, at_least=False)])


if __name__ == "__main__":
    program(main)
