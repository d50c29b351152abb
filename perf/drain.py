"""What does a drain cost the next save? Its time alone, beside a drain that pauses for it, beside one that does not.

    .venv/bin/python perf/drain.py --scratch DIR --bulk DIR [--size 512MiB] [--rounds 24]

Interleaved, in a new order each round. A save is durable when it ends (files and directory fsynced). The drain of an
older step is at work, at full speed, when the save begins. `at most 5 %` is held against the upper end of the interval.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from entry import program
from tunetool.checkpoint import drain, saving
from tunetool.checkpoint.steps import fsync_directory
from tunetool.node.units import parse_size
from tunetool.tune.pairs import interval_of

MOST = 1.05
"""Time that a save may take beside a drain, relative to its time alone."""
ARMS = ("alone", "beside a drain", "beside one that does not pause")


def save(scratch: Path, state: dict[str, torch.Tensor], number: int, announced: bool) -> float:
    path = scratch / f"step_{number}"
    with saving(scratch) if announced else contextlib.nullcontext():
        began = time.perf_counter()
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path))
        fsync_directory(path)
        return time.perf_counter() - began


def sample(arm: str, scratch: Path, bulk: Path, state: dict[str, torch.Tensor], number: int) -> tuple[float, int]:
    """Seconds of the save, and bytes that the drain moved meanwhile."""
    os.sync()
    if arm == "alone":
        return save(scratch, state, number, announced=True), 0
    work = drain(scratch / "step_0", bulk)
    try:
        while not (parts := list(bulk.glob(".draining-*/.part-0-*"))) or parts[0].stat().st_size < 32 * 2**20:
            time.sleep(0.001)
            if not work.running:
                raise SystemExit(f"the drain ended before the save began: {work.wait()}")
        before = parts[0].stat().st_size
        seconds = save(scratch, state, number, announced=arm == "beside a drain")
        moved = (parts[0].stat().st_size - before) if parts[0].exists() else -1
    finally:
        work.stop()
        for left in bulk.iterdir():
            shutil.rmtree(left)
    return seconds, moved


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--bulk", type=Path, required=True)
    parser.add_argument("--size", type=parse_size, default=512 * 2**20)
    parser.add_argument("--rounds", type=int, default=24)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    source = random.Random(1)
    state = {f"weight{index}": torch.randn(options.size // 8 // 4) for index in range(8)}
    drained = {f"weight{index}": torch.randn(options.size // 8 // 4 * 4) for index in range(8)}
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    moved: dict[str, list[int]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory(dir=options.scratch) as a, tempfile.TemporaryDirectory(dir=options.bulk) as b:
        scratch, bulk = Path(a), Path(b)
        save(scratch, drained, 0, announced=False)
        del drained
        for number in range(1, options.rounds + 1):
            for arm in source.sample(ARMS, len(ARMS)):
                seconds, count = sample(arm, scratch, bulk, state, number)
                times[arm].append(seconds)
                moved[arm].append(count)
                shutil.rmtree(scratch / f"step_{number}")
    good = True
    print(f"saves of {options.size / 2**20:.0f} MiB, {options.rounds} rounds")
    for arm in ARMS:
        interval = interval_of(times[arm])
        line = f"{arm:31} {interval.value:6.3f} s [{interval.low:.3f} to {interval.high:.3f}]"
        if arm != "alone":
            ratio = interval_of([b / a for a, b in zip(times["alone"], times[arm], strict=True)])
            drained_bytes = interval_of(moved[arm]).value / 2**20
            line += f"; x {ratio.value:.3f} [{ratio.low:.3f} to {ratio.high:.3f}], {ratio.level:.1%}"
            line += f"; {drained_bytes:.0f} MiB drained meanwhile"
            good = good and (arm != "beside a drain" or ratio.high <= MOST)
        print(line)
    print(f"at most x {MOST} wanted beside a drain: {'yes' if good else 'not shown'}")
    return 0 if good else 1


if __name__ == "__main__":
    program(main)
