"""What a tensor costs: the same bytes as 55, 1,344 and 10,000 tensors, saved, planned, and on a GPU copied.

    .venv/bin/python perf/shapes.py [--bytes 256MB]
    .venv/bin/python perf/shapes.py --device cuda --bytes 7.4GB

A turn is a first save (what earlier saves of that shape left is forgotten, but for buffers), two later saves into new
directories, an asynchronous save, torch's planning alone, and on a GPU a copy to pinned memory: whole calls of
`dcp.save` until all is durable, garbage collected before. On a CPU the work of a tensor is judged: CPU seconds of all
threads that a save of many takes beyond one of 55 and beyond torch's planning, over the tensors; wall seconds would
also count other programs. On a GPU the ratio to 55 tensors is, and the stall of an asynchronous save against that
copy.
"""

from __future__ import annotations

import gc
import itertools
import logging
import shutil
import statistics
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta

from rounds import Arms, Call, Samples, program, sample, timed
from tunetool.checkpoint import DirectSavePlanner, DirectWriter, planner, rank_layout
from tunetool.measure.rounds import drawn_order
from tunetool.node.units import parse_size

PINNED_BYTES = 1 << 30
Spent = dict[str, tuple[float, float]]
"""Seconds, and those of the CPU, of each thing in a turn."""


class Shape:
    """One number of tensors."""

    def __init__(self, count: int, total: int, device: str, path: Path) -> None:
        self.count, self.total, self.device, self.path = count, total, device, path
        made = torch.Generator(device=device).manual_seed(count)
        rows = max(1, total // 4 // count // 64)
        # As DCP is mostly used. Of keys at the top, torch itself makes a log record each, and more.
        self.state = {
            "model": {
                f"model.layers.{number}.weight": torch.empty(rows, 64, device=device).normal_(generator=made)
                for number in range(count)
            }
        }

    def timed(self, act: Callable[[], object]) -> tuple[float, float]:
        """Seconds, and those of the CPU, of all threads."""

        def acted() -> None:
            act()
            self.wait()

        gc.collect()
        self.wait()
        _, *spent = timed(acted)
        shutil.rmtree(self.path, ignore_errors=True)  # planning alone writes nothing
        return spent[0], spent[1]

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def turn(self) -> Spent:
        planner.forget_plans()
        rank_layout.forget_layouts()
        spent = {"first": self.timed(self.save)}
        later = [self.timed(self.save), self.timed(self.save)]
        spent["later"] = (statistics.fmean(each[0] for each in later), statistics.fmean(each[1] for each in later))
        stalls: list[float] = []
        spent["async"] = self.timed(partial(self.save_behind, stalls))
        spent["planning"] = self.timed(self.plan)
        return {**spent, "stall": (stalls[0], 0.0)}

    def save(self) -> None:
        dcp.save(self.state, storage_writer=DirectWriter(self.path), planner=DirectSavePlanner(), no_dist=True)

    def save_behind(self, stalls: list[float]) -> None:
        writer, made = DirectWriter(self.path), DirectSavePlanner()
        begin = partial(dcp.async_save, self.state, storage_writer=writer, planner=made, no_dist=True)
        future, stall, _ = timed(partial(begin, async_stager=writer.stager()))
        stalls.append(stall)
        future.result()

    def plan(self) -> None:
        """As ``dcp.save`` asks for it."""
        made = DefaultSavePlanner()
        made.set_up_planner(self.state, StorageMeta(checkpoint_id=str(self.path)), is_coordinator=True)
        plans, _ = made.create_global_plan([made.create_local_plan()])
        made.finish_plan(plans[0])

    def copy(self) -> float:
        """Seconds that a copy of as many bytes to pinned memory takes, the median of five after one."""
        size = min(self.total, PINNED_BYTES)
        there = torch.zeros(size, dtype=torch.uint8, device="cuda")
        here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        spent = [self.timed(partial(here.copy_, there))[0] for _ in range(6)]
        return statistics.median(spent[1:]) * self.total / size


def prepare(call: Call) -> Arms:
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    size, place = parse_size(call.asked.bytes), call.asked.device
    counts = sorted(map(int, call.asked.tensors.split(",")))
    shapes = [Shape(count, size, place, call.folder / "turn") for count in counts]
    numbers = itertools.count()

    def all_shapes() -> Samples:
        found = {shape.count: shape.turn() for shape in drawn_order(shapes, call.asked.seed, next(numbers))}
        few = found[counts[0]]
        for shape in shapes:
            spent, about = found[shape.count], partial(sample, block=shape.count, place=place)
            yield about("stall", spent.pop("stall")[0])
            for state, (seconds, _) in spent.items():
                yield about("time", seconds, state=state)
            if place == "cuda":
                yield about("time", shape.copy(), state="pinned copy")
            for state in ("first", "later") if shape.count > counts[0] else ():
                more = (spent[state][1] - few[state][1]) / (shape.count - counts[0])
                yield about("cpu", more - spent["planning"][1] / shape.count, state=state)

    for shape in shapes:  # buffers are made and modules are imported outside of the rounds
        shape.turn()
    return {"shapes": all_shapes}


if __name__ == "__main__":
    program(prepare, target=Path("/dev/shm"), bytes="256MB", tensors="55,1344,10000", device="cpu")
