"""Does `tunetool bench ds-io` measure the same as DeepSpeed's own `ds_io`, where that is right?

    .venv/bin/python perf/against_ds_io.py --target DIR [--rounds 9] [--io-size 1G] [--io-parallel 1]

Equal parameters: both write a file of the same size in the same directory, overwrite it, and read it. ds_io's number
is the mean over its loops by the wall clock of its process (E2E); it says "GB/sec" and means GiB/s. Ours is the median
loop, timed in the same place: until the handle's `wait` returns.
"""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from pathlib import Path

from rounds import Arms, Call, Samples, output, program, sample, tunetool
from tunetool.errors import CannotJudge
from tunetool.measure.sampling import Repeats, again

WAYS: dict[str, list[str]] = {"write": [], "read": ["--read"]}


def of_deepspeed(name: str, found: str, *words: object) -> re.Match[str]:
    """What matches in what one of DeepSpeed's programs prints, in an environment where its loader finds ninja."""
    path = Path(sys.executable).with_name(name)
    printed = output(path, *words, env={**os.environ, "PATH": f"{path.parent}{os.pathsep}{os.environ['PATH']}"})
    match = re.search(found, printed, re.MULTILINE | re.DOTALL)
    if not match:
        raise RuntimeError(f"`{name}` printed no result\n{printed[-1000:]}")
    return match


def ds_io(folder: Path, *words: object) -> float:
    """Bytes per second, as it prints them."""
    speed = r"^E2E (?:Read|Write) Speed = ([0-9.]+) GB/sec"
    return float(of_deepspeed("ds_io", speed, "--folder", folder / "data", *words)[1]) * 2**30


def bench_ds_io(folder: Path, *words: object) -> float:
    """Bytes per second. Raises ``CannotJudge`` where something else uses the drives all the time."""
    line = ["bench", "ds-io", "--folder", folder / "data", "--runs-dir", folder / "runs", "--allow-busy", *words]
    record = again(
        "bench ds-io",
        lambda _: tunetool(*line, codes=(0, 3)),
        lambda each: ["proven" if each["verdict"]["status"] == "pass" else "other-io"],
        Repeats(),
        print,
    )
    if record["verdict"]["status"] != "pass":
        raise CannotJudge(record["verdict"]["reasons"][0])
    return next(float(each["value"]) for each in record["measurements"] if each["figure"] == "bandwidth")


def prepare(call: Call) -> Arms:
    shape: list[object] = ["--io_size", call.asked.io_size, "--block_size", "1M", "--queue_depth", 32]
    shape += ["--io_parallel", call.asked.io_parallel, "--loops", 3, "--warmup_loops", 1]
    (call.folder / "data").mkdir()
    ds_io(call.folder, *shape)  # compiles, if it must; the reads find its file

    def turn(name: str, way: str) -> Samples:
        measure = ds_io if name == "ds_io" else bench_ds_io
        yield sample("bandwidth", measure(call.folder, *shape, *WAYS[way]), engine=name, direction=way)

    return {f"{name}, {way}": partial(turn, name, way) for name in ("ds_io", "bench ds-io") for way in WAYS}


if __name__ == "__main__":
    program(prepare, io_size="1G", io_parallel=1)
