"""What the coordinator of a save does for 256 and 1,024 ranks of 1,344 tensors, and how long that takes.

    .venv/bin/python perf/coordinator.py [--few 256] [--many 1024] [--tensors 1344]

The ranks are simulated: their plans and results are pickled as ranks send them, one rank at a time, before the time
begins. Each rank holds one part along dimension 0 of every tensor, as FSDP does. The coordinator unpickles the plans,
plans, pickles the answers, unpickles the results, writes `.metadata`, commits, and pickles the metadata that torch
sends to every rank; then the same again in place, as at the next step. No network, and no data files. Each turn is a
process of its own, whose peak memory with Python and torch is its alone. Seconds of the CPU for each rank say whether
it is linear: wall seconds would also count other programs.
"""

from __future__ import annotations

import gc
import pickle
import resource
import shutil
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from rounds import Arms, Call, Samples, program, sample, timed
from tunetool.checkpoint import DirectSavePlanner, DirectWriter, commit
from tunetool.checkpoint.columns import PackedTable
from tunetool.checkpoint.packed import PackedItems, PackedStored, Results

ROWS, COLUMNS, FILES = 8, 1024, 8


def asked_of(rank: int, ranks: int, tensors: int) -> bytes:
    """The plan that a rank sends."""
    items, mappings = [], {}
    for number in range(tensors):
        name, offsets = f"model.layers.{number}.mlp.weight", torch.Size((ROWS * rank, 0))
        chunk = ChunkStorageMetadata(offsets, torch.Size((ROWS, COLUMNS)))
        data = TensorWriteData(chunk, TensorProperties(torch.bfloat16), torch.Size((ROWS * ranks, COLUMNS)))
        items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
        mappings[name] = ("model", f"layers.{number}.mlp.weight")
    return pickle.dumps(SavePlan(PackedItems(items), planner_data=PackedTable(mappings)))


def result_of(rank: int, answer: SavePlan) -> bytes:
    """What a rank sends when its files are written."""
    numbers = range(len(answer.items))
    offsets = [number // FILES * (ROWS * COLUMNS * 2 + 4096) for number in numbers]
    stored = PackedStored.of(
        answer.items, [number % FILES for number in numbers], offsets, [ROWS * COLUMNS * 2 + 900 for _ in numbers]
    )
    names = tuple(commit.data_name(rank, number, answer.storage_data.token) for number in range(FILES))
    return pickle.dumps(Results(stored, names))


def save(path: Path, asked: list[bytes]) -> tuple[float, float]:
    """Seconds, and seconds of the CPU, that the coordinator takes; what ranks do between is not counted."""
    gc.collect()
    writer, planner = DirectWriter(path), DirectSavePlanner()
    writer.set_up_storage_writer(True)
    writer.prepare_local_plan(SavePlan([]))

    def plan() -> tuple[list[bytes], Any]:
        answers, metadata = planner.create_global_plan([pickle.loads(each) for each in asked])
        return [pickle.dumps(each) for each in writer.prepare_global_plan(answers)], metadata

    def finish() -> None:
        writer.finish(metadata, [pickle.loads(each) for each in sent])
        pickle.dumps(metadata)

    (answers, metadata), planned, worked = timed(plan)
    sent = [result_of(rank, pickle.loads(answer)) for rank, answer in enumerate(answers)]
    del answers
    _, finished, more = timed(finish)
    return planned + finished, worked + more


def coordinate(path: Path, ranks: int, tensors: int) -> list[tuple[float, float]]:
    warnings.simplefilter("ignore")
    asked = [asked_of(rank, ranks, tensors) for rank in range(ranks)]
    return [save(path, asked) for _ in range(2)]


def prepare(call: Call) -> Arms:
    def turn(ranks: int) -> Samples:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            saves = pool.submit(coordinate, call.folder / "step", ranks, call.asked.tensors).result()
            peak = pool.submit(resource.getrusage, resource.RUSAGE_SELF).result().ru_maxrss * 1024
        shutil.rmtree(call.folder / "step")
        yield sample("memory", peak, ranks=ranks)
        for state, (seconds, cpu) in zip(("first", "later"), saves, strict=True):
            yield sample("time", seconds, ranks=ranks, state=state)
            yield sample("cpu", cpu / ranks, ranks=ranks, state=state)

    return {f"{ranks} ranks": partial(turn, ranks) for ranks in (call.asked.few, call.asked.many)}


if __name__ == "__main__":
    program(prepare, target=Path("/dev/shm"), few=256, many=1024, tensors=1344)
