"""A rank on a node of the tests' cluster: it saves, replicates, drains, or resumes and says what it resumed from.

Each rank saves a tensor of its own, whose values follow from the step, the save's number and the rank.
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

from tunetool.checkpoint import DirectReader, DirectWriter, drain, latest, replicate, replicating
from tunetool.errors import TunetoolError


def tensor(seed: int, rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1000 * seed + rank))


class Rank:
    def __init__(self, order: dict[str, Any]) -> None:
        self.rank, self.order = order["rank"], order
        self.scratch, self.count, self.clock = Path(order["scratch"]), order["count"], 0
        replicating.now_ns = lambda: time.time_ns() + self.clock * 10**9

    def save(self, step: int, seed: int, clock: int = 0) -> None:
        path = self.scratch / f"step_{step}"
        writer = (
            dcp.FileSystemWriter(path, single_file_per_rank=True, sync_files=False)
            if self.order.get("torch_s")
            else DirectWriter(path, threads=1)
        )
        dcp.save({f"weight{self.rank}": tensor(seed, self.rank, self.count)}, storage_writer=writer)
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
        state = {f"weight{self.rank}": torch.zeros(self.count)}
        error, values = None, None
        try:
            dcp.load(state, storage_reader=DirectReader(last.path))
            loaded = state[f"weight{self.rank}"]
            values = next(
                (seed for seed in range(20) if torch.equal(loaded, tensor(seed, self.rank, self.count))), None
            )
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
