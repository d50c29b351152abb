"""What does a tensor cost? The same bytes as 55, 1,344 and 10,000 tensors, saved and restored.

    .venv/bin/python perf/checkpoint_shapes.py [--target /dev/shm] [--bytes 256MB] [--tensors 55,1344,10000]
    .venv/bin/python perf/checkpoint_shapes.py --device cuda --bytes 7.4GB --against-fio     # on a GPU

Interleaved: in each round every number of tensors has its turn, in an order drawn from --seed. A turn is a first save
(what earlier saves of that shape left is forgotten, but for buffers), two later saves into new directories, a restore
of the last one, an asynchronous save, torch's planning alone, and on a GPU a copy to pinned memory. The second number
of tensors is also saved by torch.save with fsync, and where nvidia-resiliency-ext is installed on a GPU, asynchronously
by that. `--against-fio`: fio writes and reads the same bytes once in each round, in the number of files that was
fastest before the rounds. Seconds until all is durable, whole calls of `dcp.save` and `dcp.load`, garbage collected
before. `--budget`: no round begins later than that.

A line for each goal: the median over the rounds, its interval, the goal, and `held`, `missed`, or `not decided` where
the interval crosses the goal. On a CPU the goal is the work of a tensor: the seconds of the CPU, of all threads, that a
save of many tensors takes beyond one of 55 and beyond torch's planning, divided by the tensors. Wall seconds would also
count other programs, where there are few cores. The ratio to 55 tensors is shown there without a goal. On a GPU it has
one, and so has the stall of an asynchronous save, against the copy to pinned memory and nvidia-resiliency-ext's. With
fio, the shares of its best have goals on both. The ratio to torch.save has none: fio's own differs between machines.
Ends with 1 where something is missed, else with 3 where something is not decided.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta

from entry import program
from goals import figure, line, status
from tunetool.bench.checkpoint.engines import ENGINES
from tunetool.bench.checkpoint.engines.base import Context, Engine
from tunetool.bench.checkpoint.fio_best import FioBest
from tunetool.checkpoint import DirectLoadPlanner, DirectReader, DirectSavePlanner, DirectWriter, planner, rank_layout
from tunetool.measure.fio import find_fio
from tunetool.measure.sequential import takes_direct_io
from tunetool.measure.statistics import estimate
from tunetool.node.machine.block_stack import read_stack
from tunetool.node.units import parse_size

TENSOR_MICROSECONDS = 50.0
LATER, FIRST, FIO = 1.15, 1.5, 0.85
STALL, STALL_OF_MORE = 1.15, 1.4
"""Up to 2,000 tensors, and of more."""
NVIDIA = "nvidia-resiliency-ext"
PINNED_BYTES = 1 << 30
State = dict[str, torch.Tensor]


def build(count: int, total: int, device: str) -> State:
    """``count`` float32 tensors of ``total`` bytes together."""
    rows = max(1, total // 4 // count // 64)
    made = torch.Generator(device=device).manual_seed(count)
    return {
        f"model.layers.{number}.weight": torch.empty(rows, 64, device=device).normal_(generator=made)
        for number in range(count)
    }


class Turns:
    """The turns of one number of tensors."""

    def __init__(self, count: int, total: int, device: str, folder: Path, compared: bool, other: Engine | None) -> None:
        self.count, self.total, self.device, self.folder = count, total, device, folder
        self.compared, self.other = compared, other
        # As DCP is mostly used. Of keys at the top, torch itself makes a log record each, and more.
        self.state = {"model": build(count, total, device)}
        self.blank = {"model": {name: torch.zeros_like(tensor) for name, tensor in self.state["model"].items()}}
        self.seconds: dict[str, list[float]] = {}
        self.cpu_seconds: dict[str, list[float]] = {}
        """Of all threads, by the same names."""

    def timed(self, name: str, act: Callable[[Path], None], keep: bool = False) -> None:
        path = self.folder / "turn"
        gc.collect()
        self.wait()
        began, worked = time.perf_counter(), time.process_time()
        act(path)
        self.wait()
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)
        self.cpu_seconds.setdefault(name, []).append(time.process_time() - worked)
        if not keep and path.exists():  # planning alone writes nothing
            shutil.rmtree(path)

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def round(self) -> None:
        planner.forget_plans()
        rank_layout.forget_layouts()
        self.timed("first", self.direct)
        self.timed("later", self.direct)
        self.timed("later", self.direct, keep=True)
        self.timed("restore", self.restore)
        self.timed("async", self.behind)
        self.timed("planning", self.planning)
        if self.device == "cuda":
            self.seconds.setdefault("pinned copy", []).append(statistics.median(pinned_copy(self.total)))
        if self.compared:
            self.timed("torch.save", self.torch_save)
        if self.other is not None:
            self.timed(NVIDIA, self.by_nvidia)

    def by_nvidia(self, path: Path) -> None:
        assert self.other is not None
        path.mkdir()
        began = time.perf_counter()
        pending = self.other.save(self.state["model"], path)
        torch.cuda.current_stream().synchronize()
        self.seconds.setdefault(f"{NVIDIA} stall", []).append(time.perf_counter() - began)
        pending.wait()

    def check_nvidia(self) -> None:
        """Ends the program unless a checkpoint of nvidia-resiliency-ext brings every byte back."""
        assert self.other is not None
        path = self.folder / "other"
        path.mkdir()
        self.other.save(self.state["model"], path).wait()
        self.other.load(self.blank["model"], path)
        shutil.rmtree(path)
        self.check()

    def restore(self, path: Path) -> None:
        dcp.load(self.blank, storage_reader=DirectReader(path), planner=DirectLoadPlanner(), no_dist=True)

    def check(self) -> None:
        """Ends the program unless the last restore brought every byte."""
        for name, tensor in self.state["model"].items():
            if not torch.equal(tensor, self.blank["model"][name]):
                sys.exit(f"`{name}` of {self.count} came back with other values")
            self.blank["model"][name].zero_()

    def direct(self, path: Path) -> None:
        dcp.save(self.state, storage_writer=DirectWriter(path), planner=DirectSavePlanner(), no_dist=True)

    def behind(self, path: Path) -> None:
        writer = DirectWriter(path)
        began = time.perf_counter()
        future = dcp.async_save(
            self.state, storage_writer=writer, planner=DirectSavePlanner(), async_stager=writer.stager(), no_dist=True
        )
        self.seconds.setdefault("stall", []).append(time.perf_counter() - began)
        future.result()

    def planning(self, path: Path) -> None:
        """As ``dcp.save`` asks for it."""
        made = DefaultSavePlanner()
        made.set_up_planner(self.state, StorageMeta(checkpoint_id=str(path)), is_coordinator=True)
        plans, _ = made.create_global_plan([made.create_local_plan()])
        made.finish_plan(plans[0])

    def torch_save(self, path: Path) -> None:
        path.mkdir()
        with (path / "state.pt").open("wb") as stream:
            torch.save(self.state, stream)
            stream.flush()
            os.fsync(stream.fileno())

    def forget(self) -> None:
        """Forget the rounds before this."""
        self.seconds.clear()
        self.cpu_seconds.clear()

    def of_rounds(self, name: str) -> list[float]:
        """Seconds, one value for each round: the mean where a round has several."""
        return by_round(self.seconds[name], len(self.seconds["first"]))

    def cpu_of_rounds(self, name: str) -> list[float]:
        """As ``of_rounds``, seconds of the CPU."""
        return by_round(self.cpu_seconds[name], len(self.cpu_seconds["first"]))


def by_round(values: list[float], rounds: int) -> list[float]:
    each = len(values) // rounds
    return [statistics.fmean(values[first : first + each]) for first in range(0, len(values), each)]


def ratios(over: list[float], under: list[float]) -> list[float]:
    return [one / other for one, other in zip(over, under, strict=True)]


def of_a_tensor(name: str, many: Turns, few: Turns) -> list[float]:
    """Microseconds of the CPU that each tensor more takes, over those of torch's planning."""
    spent = zip(many.cpu_of_rounds(name), few.cpu_of_rounds(name), many.cpu_of_rounds("planning"), strict=True)
    more = many.count - few.count
    return [1e6 * ((save - of_few) / more - plan / many.count) for save, of_few, plan in spent]


def pinned_copy(total: int) -> list[float]:
    """Seconds that a copy of as many bytes from the GPU to pinned memory takes."""
    size = min(total, PINNED_BYTES)
    there = torch.zeros(size, dtype=torch.uint8, device="cuda")
    here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    seconds = []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        here.copy_(there)
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - began) * total / size)
    return seconds[1:]


def judge(turns: dict[int, Turns], device: str, total: int, fio: dict[str, list[float]]) -> list[str]:
    few = turns[min(turns)]
    verdicts = []
    for each in turns.values():
        if fio and each.compared:
            of_fio = {
                name: [total / seconds / best for seconds, best in zip(each.of_rounds(name), rates, strict=True)]
                for name, rates in (("later", fio["write"]), ("restore", fio["read"]))
            }
            verdicts += [
                line(f"{each.count} tensors: a later save, share of fio's write", of_fio["later"], FIO),
                line(f"{each.count} tensors: a restore, share of fio's read", of_fio["restore"], FIO),
            ]
    for count in sorted(turns)[1:]:
        many = turns[count]
        later, base = many.of_rounds("later"), few.of_rounds("later")
        over = {"later": ratios(later, base), "first": ratios(many.of_rounds("first"), few.of_rounds("first"))}
        if many.compared:
            speed = ratios(many.of_rounds("torch.save"), later)
            print(figure(f"{count} tensors: a later save, x torch.save's speed", speed))
        if device == "cpu":
            for name, times in over.items():
                what = f"{count} tensors: us of the CPU for a tensor of a {name} save, over torch's plan"
                verdicts.append(line(what, of_a_tensor(name, many, few), TENSOR_MICROSECONDS, at_least=False))
                print(figure(f"{count} tensors: a {name} save, x {few.count} tensors", times))
            continue
        stall = ratios(many.of_rounds("stall"), many.of_rounds("pinned copy"))
        verdicts += [
            line(f"{count} tensors: a later save, x {few.count} tensors", over["later"], LATER, at_least=False),
            line(f"{count} tensors: the first save, x {few.count} tensors", over["first"], FIRST, at_least=False),
            line(
                f"{count} tensors: the stall of an async save, x pinned copy",
                stall,
                STALL if count <= 2000 else STALL_OF_MORE,
                at_least=False,
            ),
        ]
        if many.other is not None:
            stall = ratios(many.of_rounds("stall"), many.of_rounds(f"{NVIDIA} stall"))
            verdicts.append(line(f"{count} tensors: the stall, x {NVIDIA}'s", stall, 1.0, at_least=False))
    return verdicts


def show(turns: dict[int, Turns], total: int, fio: dict[str, list[float]]) -> None:
    for count, each in sorted(turns.items()):
        for name in each.seconds:
            middle = estimate(each.of_rounds(name))
            rate = "" if name == "planning" or name.endswith("stall") else f", {total / middle.value / 1e9:.2f} GB/s"
            print(
                f"{count:6} tensors {name:10} {middle.value * 1e3:9.2f} ms [{middle.low * 1e3:.2f} to "
                f"{middle.high * 1e3:.2f}], {middle.value / count * 1e6:.1f} us a tensor{rate}"
            )

    for direction, rates in fio.items():
        best = estimate(rates)
        print(f"fio, {direction}: {best.value / 1e9:.2f} GB/s [{best.low / 1e9:.2f} to {best.high / 1e9:.2f}]")


def other_engine(device: str, total: int, folder: Path) -> Engine | None:
    """nvidia-resiliency-ext's writer, if it can run here, in a group of this process alone."""
    if device != "cuda":
        return None
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    engine = ENGINES[NVIDIA]()
    reason = engine.unavailable(Context(0, 1, device, folder, total))
    if reason:
        print(f"{NVIDIA}: left out: {reason}")
        dist.destroy_process_group()
    return None if reason else engine


def best_of_fio(folder: Path, total: int) -> FioBest:
    """fio with the number of files that is fastest."""
    environment = dict(os.environ)
    made = FioBest(find_fio(environment), folder, read_stack(str(folder)), total, takes_direct_io(folder), environment)
    made.search()
    return made


def main() -> int:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--target", type=Path, default=Path("/dev/shm"))
    reader.add_argument("--bytes", type=parse_size, default=parse_size("256MB"))
    reader.add_argument("--tensors", default="55,1344,10000")
    reader.add_argument("--rounds", type=int, default=7)
    reader.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    reader.add_argument("--seed", type=int, default=0)
    reader.add_argument("--against-fio", action="store_true")
    reader.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS")
    asked = reader.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    drawn, began = random.Random(asked.seed), time.monotonic()
    counts, fio = sorted(map(int, asked.tensors.split(","))), dict[str, list[float]]()
    with tempfile.TemporaryDirectory(prefix="tunetool-shapes-", dir=asked.target) as folder:
        other, second = other_engine(asked.device, asked.bytes, Path(folder)), counts[1:2]
        turns = {
            count: Turns(
                count, asked.bytes, asked.device, Path(folder), count in second, other if count in second else None
            )
            for count in counts
        }
        # Buffers are made and modules are imported outside of the rounds.
        for each in turns.values():
            each.round()
            each.forget()
            if each.other is not None:
                each.check_nvidia()
        best = best_of_fio(Path(folder), asked.bytes) if asked.against_fio else None
        for number in range(1, asked.rounds + 1):
            if time.monotonic() - began > asked.budget:
                break
            for count in drawn.sample(counts, len(turns)):
                turns[count].round()
                turns[count].check()
            if best is not None:
                for direction, sample in zip(("write", "read"), best.sample(), strict=True):
                    fio.setdefault(direction, []).append(sample.bandwidth)
            row = ", ".join(f"{count}: {turns[count].of_rounds('later')[-1]:.3f} s" for count in counts)
            print(f"round {number} (load {os.getloadavg()[0]:.1f}): a later save of {row}", flush=True)
        if other is not None:
            other.close()
            dist.destroy_process_group()
    show(turns, asked.bytes, fio)
    return status(judge(turns, asked.device, asked.bytes, fio))


if __name__ == "__main__":
    program(main)
