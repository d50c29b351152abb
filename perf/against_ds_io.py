"""Does `tunetool bench ds-io` measure the same as DeepSpeed's own `ds_io`, where that is right?

    .venv/bin/python perf/against_ds_io.py --target DIR [--pairs 9] [--io-size 1G]

Interleaved pairs with equal parameters, in turns first and second: ds_io, then ours, then ours, then ds_io ... Both
write a file of the same size in the same directory, overwrite it, and read it. ds_io's number is the mean over its
loops by the wall clock of its process (E2E); it says "GB/sec" and means GiB/s. Ours is the median loop, timed in the
same place: until the handle's `wait` returns.

A line for each direction: the ratio of the pairs, its interval, the goal, and `held`, `missed` or `not decided`. Ends
with 1 where a goal is missed, else with 3 where one is not decided.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from entry import program
from goals import line_within, status

LOOPS, WARM_UPS = 3, 1
DIRECTIONS = ("write", "read")
MOST_THROWN = 12
NEAR = 0.05
"""How far from 1 the ratio may lie."""


def theirs(directory: Path, direction: str, size: str, shape: list[str]) -> float:
    """Bytes per second, as ds_io prints them."""
    program = Path(sys.executable).with_name("ds_io")
    command = [str(program), "--folder", str(directory), "--io_size", size, *shape, *extra(direction)]
    # ds_io's loader wants ninja on PATH, and compiles if this checkout's torch is not the one the op was built by.
    environment = {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=1800)
    match = re.search(r"^E2E (?:Read|Write) Speed = ([0-9.]+) GB/sec", done.stdout, re.MULTILINE)
    if not match:
        raise SystemExit(f"error: `ds_io` printed no speed\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    return float(match[1]) * 2**30


def ours(directory: Path, runs: Path, direction: str, size: str, shape: list[str]) -> tuple[float, float | None] | None:
    """Bytes per second without and with the sync; None if something else used the drives meanwhile."""
    command = [
        sys.executable,
        "-m",
        "tunetool",
        "bench",
        "ds-io",
        "--folder",
        str(directory),
        "--io_size",
        size,
        *shape,
    ]
    command += [*extra(direction), "--runs-dir", str(runs), "--json", "-", "--allow-busy"]
    for _ in range(60):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
        if "another tunetool run is measuring" not in done.stdout:
            break
        time.sleep(5)
    if "something else uses the drives" in done.stdout:
        return None
    if done.returncode != 0:
        raise SystemExit(
            f"error: `tunetool bench ds-io` ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr}"
        )
    figures = {m["name"]: m["value"] for m in json.loads(done.stdout)["measurements"]}
    return figures[f"ds_io.{direction}"], figures.get(f"ds_io.{direction}_durable")


def extra(direction: str) -> list[str]:
    return ["--read"] if direction == "read" else []


def spread(values: list[float], unit: float = 1e9) -> str:
    return f"{statistics.median(values) / unit:.3f} [{min(values) / unit:.3f} to {max(values) / unit:.3f}]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--io-size", default="1G")
    parser.add_argument("--io-parallel", type=int, default=1)
    parser.add_argument("--direction", choices=DIRECTIONS, action="append", help="one alone; default: both")
    options = parser.parse_args()
    shape = ["--block_size", "1M", "--queue_depth", "32", "--io_parallel", str(options.io_parallel)]
    shape += ["--loops", str(LOOPS), "--warmup_loops", str(WARM_UPS)]
    directory = Path(tempfile.mkdtemp(prefix="against-ds-io-", dir=options.target))
    words = []
    try:
        (directory / "data").mkdir()
        theirs(directory / "data", "write", options.io_size, shape)  # compiles, if it must
        for direction in options.direction or DIRECTIONS:
            first: list[float] = []
            second: list[float] = []
            durable: list[float] = []
            thrown = 0
            while len(first) < options.pairs and thrown <= MOST_THROWN:
                reference, mine = None, None
                for turn in (len(first) % 2, 1 - len(first) % 2):
                    if turn == 0:
                        reference = theirs(directory / "data", direction, options.io_size, shape)
                    else:
                        mine = ours(directory / "data", directory / "runs", direction, options.io_size, shape)
                if mine is None or reference is None:
                    # Only the drives' counters decide which run is discarded, never its speed.
                    thrown += 1
                    continue
                first.append(reference)
                second.append(mine[0])
                durable += [mine[1]] if mine[1] is not None else []
            if not first:
                raise SystemExit("error: no pair without other I/O on the drives")
            ratios = [each / before for each, before in zip(second, first, strict=True)]
            print(f"{direction:6} ds_io {spread(first)} GB/s, bench ds-io {spread(second)} GB/s", end="")
            print(f", synced {spread(durable)}" if durable else "")
            print(f"{thrown} pairs thrown away: something else used the drives")
            words.append(line_within(f"{direction}, bench ds-io / ds_io", ratios, 1 - NEAR, 1 + NEAR))
    finally:
        shutil.rmtree(directory)
    return status(words)


if __name__ == "__main__":
    program(main)
