"""Does `tunetool verify` find what the disk can do? Its figures beside those of bare fio in the same directory.

    .venv/bin/python perf/against_fio.py --target DIR [--duration 4]

Before the rounds, bare fio has a wide choice: 1 or 4 or 8 jobs at queue depth 16, 32 or 64, each once in each
direction. The shape that was fastest runs in every round, once before and once after verify; the faster run counts.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from rounds import Arm, Sample, fio, program, sample, tunetool

SHAPES = [*itertools.product((1, 4, 8), (16, 32, 64))]


def prepare(asked: argparse.Namespace, folder: Path, _: ExitStack) -> dict[str, Arm]:
    def bare(direction: str, jobs: int, depth: int) -> float:
        if direction == "read":
            fio(folder, "write", jobs, 2**30)
        speed = fio(folder, direction, jobs, 2**30, seconds=asked.duration, queue_depth=depth)
        for path in folder.glob("data.*"):
            path.unlink()
        return speed

    best = {way: max(SHAPES, key=lambda shape: bare(way, *shape)) for way in ("read", "write")}
    print(f"bare fio is fastest with (jobs, queue depth): {best}", flush=True)

    def turn() -> Iterable[Sample]:
        before = {way: bare(way, *shape) for way, shape in best.items()}
        record = tunetool("verify", "--target", asked.target, "--duration", f"{asked.duration:g}s", codes=(0, 3))
        for way, shape in best.items():
            yield sample("bandwidth", max(before[way], bare(way, *shape)), engine="fio", direction=way)
        for each in record["measurements"]:
            if each["labels"]["subject"] == "sequential":
                yield sample("bandwidth", each["value"], engine="verify", direction=each["labels"]["direction"])

    return {"turn": turn}


if __name__ == "__main__":
    program(prepare, duration=4.0)
