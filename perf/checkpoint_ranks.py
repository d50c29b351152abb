"""What does the coordinator of a save do for 256 and 1,024 ranks of 1,344 tensors, and how long does it take?

    .venv/bin/python perf/checkpoint_ranks.py [--ranks 256,1024] [--tensors 1344] [--rounds 5] [--torch-ranks 64]

The ranks are simulated: their plans and results are pickled as ranks send them, one rank at a time, before the time
begins. Each rank holds one part along dimension 0 of every tensor, as FSDP does. The coordinator unpickles the plans,
plans, pickles the answers, unpickles the results, writes `.metadata`, commits, and pickles the metadata that torch
sends to every rank; then the same again in place, as at the next step. No network, and no data files. Each round is a
process of its own, whose peak memory is its alone: a process of Python with torch before it begins is part of it. In
each round every number of ranks has its turn.

torch's own planner and writer (`DefaultSavePlanner`, `FileSystemWriter`) do the same for --torch-ranks.

A line for each goal: the median over the rounds, its interval, the goal, and `held`, `missed`, or `not decided` where
the interval crosses the goal. Linear: seconds of the CPU for each rank, of the most ranks over the fewest; wall seconds
would also count other programs. Ends with 1 where something is missed, else with 3 where something is not decided.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from entry import program
from goals import line, status
from tunetool.checkpoint import DirectSavePlanner, DirectWriter, commit
from tunetool.checkpoint.columns import PackedTable
from tunetool.checkpoint.packed import PackedItems, PackedStored, Results
from tunetool.measure.statistics import estimate

SECONDS, GIGABYTES, LINEAR = 5.0, 4.0, 1.25
ROWS, COLUMNS, FILES = 8, 1024, 8
SAVES = ("first", "later")
STEPS = ("plans arrive", "plan", "answers leave", "results arrive", "metadata and commit", "metadata leaves")


def items_of(rank: int, ranks: int, tensors: int) -> tuple[list[WriteItem], dict[str, tuple[str, ...]]]:
    """The plan of a rank, and where in the state its names come from."""
    properties = TensorProperties(torch.bfloat16)
    items: list[WriteItem] = []
    mappings: dict[str, tuple[str, ...]] = {}
    for number in range(tensors):
        name = f"model.layers.{number}.mlp.weight"
        offsets = torch.Size((ROWS * rank, 0))
        chunk = ChunkStorageMetadata(offsets, torch.Size((ROWS, COLUMNS)))
        data = TensorWriteData(chunk, properties, torch.Size((ROWS * ranks, COLUMNS)))
        items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
        mappings[name] = ("model", f"layers.{number}.mlp.weight")
    return items, mappings


def places(count: int) -> Iterator[tuple[int, int]]:
    """Offset and length of each item in its file."""
    for number in range(count):
        yield number // FILES * (ROWS * COLUMNS * 2 + 4096), ROWS * COLUMNS * 2 + 900


class Direct:
    """tunetool's planner and writer."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def sent(self, items: list[WriteItem], mappings: Any) -> bytes:
        return pickle.dumps(SavePlan(PackedItems(items), planner_data=PackedTable(mappings)))

    def begin(self) -> None:
        self.writer, self.planner = DirectWriter(self.path), DirectSavePlanner()
        self.writer.set_up_storage_writer(True)
        self.writer.prepare_local_plan(SavePlan([]))

    def plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        answered, self.metadata = self.planner.create_global_plan(plans)
        placed: list[SavePlan] = self.writer.prepare_global_plan(answered)
        return placed

    def results(self, rank: int, answer: SavePlan) -> bytes:
        """What a rank sends."""
        files = [number % FILES for number in range(len(answer.items))]
        offsets, lengths = zip(*places(len(files)), strict=True)
        names = tuple(commit.data_name(rank, number, answer.storage_data.token) for number in range(FILES))
        return pickle.dumps(Results(PackedStored.of(answer.items, files, offsets, lengths), names))

    def finish(self, results: list[Any]) -> None:
        self.writer.finish(self.metadata, results)


class Torch:
    """torch's own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def sent(self, items: list[WriteItem], mappings: Any) -> bytes:
        return pickle.dumps(SavePlan(items, planner_data=mappings))

    def begin(self) -> None:
        self.writer, self.planner = FileSystemWriter(self.path), DefaultSavePlanner()
        self.writer.set_up_storage_writer(True)
        self.writer.prepare_local_plan(SavePlan([]))

    def plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        answered, self.metadata = self.planner.create_global_plan(plans)
        prepared: list[SavePlan] = self.writer.prepare_global_plan(answered)
        return prepared

    def results(self, rank: int, answer: SavePlan) -> bytes:
        sent = []
        for number, (item, (offset, length)) in enumerate(zip(answer.items, places(len(answer.items)), strict=True)):
            info = _StorageInfo(f"__{rank}_{number % FILES}.distcp", offset, length)
            sent.append(WriteResult(item.index, length, info))
        return pickle.dumps(sent)

    def finish(self, results: list[Any]) -> None:
        self.writer.finish(self.metadata, results)


def pickled(parts: Sequence[Any]) -> list[bytes]:
    return [pickle.dumps(each) for each in parts]


def unpickled(parts: Sequence[bytes]) -> list[Any]:
    return [pickle.loads(each) for each in parts]


def once(kind: str, ranks: int, tensors: int, path: Path) -> dict[str, Any]:
    engine = Direct(path) if kind == "direct" else Torch(path)
    asked = [engine.sent(*items_of(rank, ranks, tensors)) for rank in range(ranks)]
    saves, worked = [], []
    for _ in range(2):
        seconds: dict[str, float] = {}
        cpu_seconds: list[float] = []

        def timed(
            step: str, act: Callable[[], Any], into: dict[str, float] = seconds, cpu: list[float] = cpu_seconds
        ) -> Any:
            began, worked_before = time.perf_counter(), time.process_time()
            value = act()
            into[step] = time.perf_counter() - began
            cpu.append(time.process_time() - worked_before)
            return value

        gc.collect()
        engine.begin()
        plans = timed("plans arrive", partial(unpickled, asked))
        answers = timed("plan", partial(engine.plan, plans))
        del plans
        left = timed("answers leave", partial(pickled, answers))
        del answers
        sent = [engine.results(rank, pickle.loads(answer)) for rank, answer in enumerate(left)]
        del left
        results = timed("results arrive", partial(unpickled, sent))
        del sent
        timed("metadata and commit", partial(engine.finish, results))
        del results
        timed("metadata leaves", lambda: pickle.dumps(engine.metadata))
        saves.append(seconds)
        worked.append(sum(cpu_seconds))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    cpu = dict(zip(SAVES, worked, strict=True))
    size = (path / ".metadata").stat().st_size
    return {**dict(zip(SAVES, saves, strict=True)), "cpu": cpu, "peak": peak, "bytes": size}


def once_in_a_process(kind: str, ranks: int, asked: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tunetool-ranks-", dir=asked.target) as folder:
        command = [sys.executable, __file__, "--once", kind, "--ranks", str(ranks), "--target", f"{folder}/step"]
        done = subprocess.run([*command, "--tensors", str(asked.tensors)], check=True, capture_output=True, text=True)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


def show(kind: str, ranks: int, answers: list[dict[str, Any]]) -> None:
    for save in SAVES:
        steps = {step: estimate([answer[save][step] for answer in answers]).value for step in STEPS}
        whole = estimate([sum(answer[save].values()) for answer in answers])
        shown = ", ".join(f"{step} {value:.2f}" for step, value in steps.items())
        print(f"{kind:6} {ranks:5} ranks, {save:5} save: {whole.value:7.2f} s ({shown})")
    memory = estimate([answer["peak"] for answer in answers]).value
    print(f"{kind:6} {ranks:5} ranks: peak {memory / 1e9:.2f} GB; `.metadata` of {answers[0]['bytes'] / 1e6:.0f} MB")


def main() -> int:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--ranks", default="256,1024")
    reader.add_argument("--tensors", type=int, default=1344)
    reader.add_argument("--rounds", type=int, default=5)
    reader.add_argument("--torch-ranks", default="64", help="empty: torch is left out")
    reader.add_argument("--target", type=Path, default=Path("/dev/shm"))
    reader.add_argument("--once", choices=["direct", "torch"], help=argparse.SUPPRESS)
    asked = reader.parse_args()
    warnings.simplefilter("ignore")
    if asked.once:
        print(json.dumps(once(asked.once, int(asked.ranks), asked.tensors, asked.target)))
        return 0
    counts = [int(count) for count in asked.ranks.split(",")]
    turns = [("torch", int(count)) for count in filter(None, asked.torch_ranks.split(","))]
    turns += [("direct", count) for count in counts]
    answers: dict[tuple[str, int], list[dict[str, Any]]] = {turn: [] for turn in turns}
    for number in range(1, asked.rounds + 1):
        for kind, ranks in turns:
            answer = once_in_a_process(kind, ranks, asked)
            answers[kind, ranks].append(answer)
            first, later = (sum(answer[save].values()) for save in SAVES)
            load = f"load {os.getloadavg()[0]:.1f}"
            print(f"round {number} ({load}): {kind}, {ranks} ranks: {first:.2f} s, then {later:.2f} s", flush=True)
    for turn, given in answers.items():
        show(*turn, given)
    measured = {count: answers["direct", count] for count in counts}
    most, fewest = max(counts), min(counts)
    verdicts = []
    for save in SAVES:
        seconds = [sum(each[save].values()) for each in measured[most]]
        verdicts.append(line(f"{most} ranks: s of the coordinator's {save} save", seconds, SECONDS, False))
        if most > fewest:
            pairs = zip(*([each["cpu"][save] for each in measured[count]] for count in (most, fewest)), strict=True)
            linear = [(large / most) / (small / fewest) for large, small in pairs]
            title = f"{save} save: CPU seconds of a rank of {most} over one of {fewest}"
            verdicts.append(line(title, linear, LINEAR, False))
    peaks = [answer["peak"] / 1e9 for answer in measured[most]]
    verdicts.append(line(f"{most} ranks: GB of peak memory of the process", peaks, GIGABYTES, False))
    return status(verdicts)


if __name__ == "__main__":
    program(main)
