"""Does `tunetool verify` find what the disk can do? Its median against the best bare fio run in the same directory.

    .venv/bin/python perf/against_fio.py --target DIR [--rounds 5] [--duration 4]

Interleaved: verify, then one bare fio for each direction, again and again. Bare fio gets a wide choice: 1 or 4 or 8
jobs at queue depth 16, 32 or 64, and the best of all its runs counts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SHARE = 0.97
"""The share of the best bare run that verify's median must reach."""

SHAPES = [(jobs, depth) for jobs in (1, 4, 8) for depth in (16, 32, 64)]


def verify(target: Path, duration: int) -> dict[str, float]:
    command = [sys.executable, "-m", "tunetool", "verify", "--target", str(target), "--duration", f"{duration}s"]
    done = subprocess.run([*command, "--json", "-"], capture_output=True, text=True, check=False)
    record = json.loads(done.stdout)
    return {m["parameters"]["direction"]: m["value"] for m in record["measurements"] if m["name"].startswith("seq")}


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=len(SHAPES))
    parser.add_argument("--duration", type=int, default=4)
    options = parser.parse_args()
    ours: dict[str, list[float]] = {"read": [], "write": []}
    theirs: dict[str, list[tuple[float, int, int]]] = {"read": [], "write": []}
    for number in range(options.rounds):
        jobs, depth = SHAPES[number % len(SHAPES)]
        rates = verify(options.target, options.duration)
        for direction, values in ours.items():
            values.append(rates[direction])
            theirs[direction].append((bare(options.target, options.duration, direction, jobs, depth), jobs, depth))
    good = True
    for direction, values in ours.items():
        best, jobs, depth = max(theirs[direction])
        middle, low, high = statistics.median(values), min(values), max(values)
        share = middle / best
        good = good and share >= SHARE
        print(
            f"{direction:6} verify {middle / 1e9:.3f} GB/s [{low / 1e9:.3f} to {high / 1e9:.3f}], best bare fio "
            f"{best / 1e9:.3f} ({jobs} jobs, depth {depth}; all {min(theirs[direction])[0] / 1e9:.3f} to "
            f"{best / 1e9:.3f}): {share:.1%}, at least {SHARE:.0%} wanted"
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
