"""Does `tunetool bench ds-io` measure the same as DeepSpeed's own `ds_io`, where that is right?

    .venv/bin/python perf/against_ds_io.py --target DIR [--rounds 9] [--io-size 1G] [--io-parallel 1]

Equal parameters: both write a file of the same size in the same directory, overwrite it, and read it. ds_io's number
is the mean over its loops by the wall clock of its process (E2E); it says "GB/sec" and means GiB/s. Ours is the median
loop, timed in the same place: until the handle's `wait` returns.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rounds import Again, Arm, Sample, output, program, sample, tunetool

WAYS: dict[str, list[str]] = {"write": [], "read": ["--read"]}


def of_deepspeed(name: str, *words: object) -> str:
    """What one of DeepSpeed's programs prints, in an environment where its loader finds ninja."""
    path = Path(sys.executable).with_name(name)
    environment = {**os.environ, "PATH": f"{path.parent}{os.pathsep}{os.environ['PATH']}"}
    return output(path, *words, env=environment)


def ds_io(folder: Path, *words: object) -> float:
    """Bytes per second, as it prints them."""
    printed = of_deepspeed("ds_io", "--folder", folder / "data", *words)
    match = re.search(r"^E2E (?:Read|Write) Speed = ([0-9.]+) GB/sec", printed, re.MULTILINE)
    if not match:
        raise RuntimeError(f"`ds_io` printed no speed\n{printed[-1000:]}")
    return float(match[1]) * 2**30


def bench_ds_io(folder: Path, *words: object) -> float:
    """Bytes per second. Raises ``Again`` where something else used the drives."""
    common = ["bench", "ds-io", "--folder", folder / "data", "--runs-dir", folder / "runs", "--allow-busy"]
    record = tunetool(*common, *words, codes=(0, 3))
    if record["verdict"]["status"] != "pass":
        raise Again(record["verdict"]["reasons"][0])
    return next(float(each["value"]) for each in record["measurements"] if each["figure"] == "bandwidth")


def prepare(asked: argparse.Namespace, folder: Path, _: ExitStack) -> dict[str, Arm]:
    shape: list[object] = ["--io_size", asked.io_size, "--block_size", "1M", "--queue_depth", 32]
    shape += ["--io_parallel", asked.io_parallel, "--loops", 3, "--warmup_loops", 1]
    (folder / "data").mkdir()
    ds_io(folder, *shape)  # compiles, if it must; the reads find its file

    def turn(name: str, way: str) -> Iterable[Sample]:
        measure = ds_io if name == "ds_io" else bench_ds_io
        yield sample("bandwidth", measure(folder, *shape, *WAYS[way]), engine=name, direction=way)

    return {f"{name}, {way}": partial(turn, name, way) for name in ("ds_io", "bench ds-io") for way in WAYS}


if __name__ == "__main__":
    program(prepare, io_size="1G", io_parallel=1)
