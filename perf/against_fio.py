"""Does `tunetool verify` find what the disk can do? Its figures against those of bare fio in the same directory.

    .venv/bin/python perf/against_fio.py --target DIR [--rounds 7] [--duration 4]

Before the rounds, bare fio has a wide choice: 1 or 4 or 8 jobs at queue depth 16, 32 or 64, each once in each
direction. The shape that was fastest runs in every round, once before and once after verify; the faster run counts.

A line for each direction: verify over bare fio of the same round, its interval, the goal, and `held`, `missed` or `not
decided`. Ends with 1 where a goal is missed, else with 3 where one is not decided.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from operator import itemgetter
from pathlib import Path

from entry import program
from goals import line, status

DIRECTIONS = ("read", "write")
SHARE = 0.97
"""Of the bare run, that verify must reach."""

SHAPES = [(jobs, depth) for jobs in (1, 4, 8) for depth in (16, 32, 64)]


def verify(target: Path, duration: int) -> dict[str, float]:
    command = [sys.executable, "-m", "tunetool", "verify", "--target", str(target), "--duration", f"{duration}s"]
    done = subprocess.run([*command, "--json", "-"], capture_output=True, text=True, check=False)
    record = json.loads(done.stdout)
    return {
        m["parameters"]["direction"]: m["value"]
        for m in record["measurements"]
        if m["labels"]["subject"] == "sequential"
    }


def bare(target: Path, duration: int, direction: str, jobs: int, depth: int) -> float:
    directory = Path(tempfile.mkdtemp(prefix="bare-", dir=target))
    size = 2**30 // jobs
    shape = [f"--numjobs={jobs}", f"--iodepth={depth}", f"--size={size}", "--bs=1M", "--direct=1", "--thread"]
    common = ["fio", "--name=bare", "--ioengine=libaio", "--group_reporting", "--output-format=json", *shape]
    try:
        if direction == "read":
            subprocess.run([*common, "--rw=write"], cwd=directory, check=True, capture_output=True)
        timed = [*common, f"--rw={direction}", "--time_based", f"--runtime={duration}"]
        done = subprocess.run(timed, cwd=directory, check=True, capture_output=True, text=True)
        job = json.loads(done.stdout)["jobs"][0][direction]
        return float(job["io_bytes"]) / (float(job["runtime"]) / 1000)
    finally:
        shutil.rmtree(directory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--duration", type=int, default=4)
    options = parser.parse_args()

    def run(direction: str, shape: tuple[int, int]) -> float:
        return bare(options.target, options.duration, direction, *shape)

    best: dict[str, tuple[int, int]] = {}
    for direction in DIRECTIONS:
        by_shape = {shape: run(direction, shape) for shape in SHAPES}
        best[direction] = max(by_shape.items(), key=itemgetter(1))[0]
        jobs, depth = best[direction]
        print(f"{direction}: bare fio is fastest with {jobs} jobs at queue depth {depth}", flush=True)
    shares: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
    for number in range(options.rounds):
        before = {direction: run(direction, best[direction]) for direction in DIRECTIONS}
        rates = verify(options.target, options.duration)
        row = []
        for direction in DIRECTIONS:
            theirs = max(before[direction], run(direction, best[direction]))
            shares[direction].append(rates[direction] / theirs)
            row.append(f"{direction} {rates[direction] / 1e9:.2f} of {theirs / 1e9:.2f} GB/s")
        print(f"round {number + 1} (load {os.getloadavg()[0]:.1f}): {', '.join(row)}", flush=True)
    return status([line(f"{direction}, verify / bare fio", values, SHARE) for direction, values in shares.items()])


if __name__ == "__main__":
    program(main)
