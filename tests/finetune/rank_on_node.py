"""A rank on a node of the tests' cluster: it saves, replicates, drains, or resumes and says what it resumed from.

Each rank saves its shard of a tensor, whose values follow from the save's number and the rank, and what all ranks hold
alike: an object, a tensor and the counters of an optimizer.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tunetool.checkpoint import (
    DirectReader,
    DirectSavePlanner,
    DirectWriter,
    Saver,
    drain,
    latest,
    replicate,
    replicating,
)
from tunetool.errors import TunetoolError


def tensor(seed: int, rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1000 * seed + rank))


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    local, theirs = one["weight"].to_local(), other["weight"].to_local()
    if not torch.equal(local, theirs):
        return False
    if "trainer" not in one:
        return True
    counters = zip(one["counters"].values(), other["counters"].values(), strict=True)
    equal = torch.equal(one["norm"], other["norm"]) and all(torch.equal(*pair) for pair in counters)
    return equal and one["trainer"] == other["trainer"]


class Rank:
    def __init__(self, order: dict[str, Any]) -> None:
        self.rank, self.order = order["rank"], order
        self.scratch, self.count, self.clock = Path(order["scratch"]), order["count"], 0
        copies = order.get("copies", 1)
        self.shards = order["world"] // copies
        self.mesh = init_device_mesh("cpu", (copies, self.shards))
        replicating.now_ns = lambda: time.time_ns() + self.clock * 10**9

    def state(self, seed: int) -> dict[str, Any]:
        values = tensor(seed, self.rank % self.shards, self.count)
        state: dict[str, Any] = {"weight": DTensor.from_local(values, self.mesh, [Replicate(), Shard(0)])}
        if self.order.get("shared", not self.order.get("torch_s")):
            counters = {str(number): torch.tensor(float(seed)) for number in range(20)}
            state |= {"trainer": {"step": seed}, "norm": tensor(seed, 99, 1000), "counters": counters}
        return state

    def save(self, step: int, seed: int, clock: int = 0) -> None:
        path = self.scratch / f"step_{step}"
        writer = (
            dcp.FileSystemWriter(path, single_file_per_rank=True, sync_files=False)
            if self.order.get("torch_s")
            else DirectWriter(path, threads=1)
        )
        planner = None if self.order.get("torch_s") else DirectSavePlanner()
        dcp.save(self.state(seed), storage_writer=writer, planner=planner)
        dist.barrier()
        self.clock = clock
        for file in path.iterdir():  # as if this node's clock were that wrong
            if clock:
                when = file.stat().st_mtime + clock
                os.utime(file, (when, when))

    def replicate(self, step: int, ranks: list[int], **options: Any) -> None:
        path = self.scratch / f"step_{step}"
        content = [(path / ".metadata").read_bytes() if self.rank == 0 else None]
        dist.broadcast_object_list(content)
        if self.rank in ranks and os.environ["LOCAL_RANK"] == "0":
            peer = self.order["peer"]
            print(
                replicate(path, peer=peer, metadata=content[0], ssh=self.order["ssh"], **options).wait().problem or ""
            )

    def save_and_replicate(self, steps: list[int], slow: int, rate: float) -> None:
        limit = {"rate": rate} if self.rank == slow else {}
        with Saver([self.scratch], replicas={"ssh": self.order["ssh"], **limit}) as saver:
            for step in steps:
                saver.save_async(self.state(step), step)
                saver.wait()
                if saver.replica:
                    print(json.dumps({"step": step, "replica": saver.replica.wait().path}))

    def drain(self, step: int) -> None:
        drain(self.scratch / f"step_{step}", self.order["bulk"], rank=self.rank, world=self.order["world"]).wait()

    def resume(self) -> None:
        began = time.monotonic()
        try:
            last = latest([self.scratch, self.order["bulk"]], replicas=True, ssh=self.order["ssh"])
        except TunetoolError as error:
            print(json.dumps({"error": error.line}))
            return
        seconds = time.monotonic() - began
        if last is None:
            print(json.dumps({"step": None}))
            return
        state = self.state(0)
        error, values = None, None
        try:
            dcp.load(state, storage_reader=DirectReader(last.path))
            values = next((seed for seed in range(1, 20) if same(state, self.state(seed))), None)
        except dcp.api.CheckpointException as raised:
            error = str(raised)
        said = {"step": last.step, "path": str(last.path), "skipped": last.skipped, "bytes": last.brought_bytes}
        print(json.dumps({**said, "seconds": seconds, "values": values, "error": error}))


def main(order: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    store = f"tcp://{order['master']}:29500"
    dist.init_process_group("gloo", init_method=store, rank=order["rank"], world_size=order["world"])
    rank = Rank(order)
    for name, options in order["do"]:
        getattr(rank, name)(**options)
        dist.barrier()
        print(f"done: {name}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
