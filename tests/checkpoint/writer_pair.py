"""One of two ranks that save together, step by step. Arguments: rank, directory, meeting file."""

from __future__ import annotations

import resource
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tunetool.checkpoint.planner import DirectSavePlanner
from tunetool.checkpoint.writer import DirectWriter

warnings.simplefilter("ignore")
torch.set_num_threads(1)
rank, directory = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))


def state(value: float) -> dict[str, object]:
    return {
        "replicated": {f"w{number}": torch.full((1000, 256), float(value + number)) for number in range(6)},
        "big": torch.arange(2_000_000.0) + value,
        "sharded": distribute_tensor(torch.arange(400_001.0).reshape(-1, 1) + value, mesh, [Shard(0)]),
        "step": int(value),
    }


def save(value: float) -> str:
    writer = DirectWriter(directory, threads=2)
    try:
        dcp.save(state(value), storage_writer=writer, planner=DirectSavePlanner(split_above=1 << 20))
    except dcp.api.CheckpointException as error:
        return f"failed on {sorted(error.failures)}: {next(iter(error.failures.values()))[0]}"
    return f"saved {writer.last.bytes if writer.last else None}"


def limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
print(save(100), flush=True)
if rank == 1:
    limit(1 << 20)
print(save(200), flush=True)
dist.barrier()
print("left:", sorted(path.name for path in directory.iterdir() if f"__{rank}_" in path.name), flush=True)
print("old:", float(dcp.FileSystemReader(directory).read_metadata() is not None), flush=True)
dist.barrier()
limit(unlimited)
# Rank 0 copies to memory first: its loop continues although rank 1 takes part only now.
writer = DirectWriter(directory, threads=2)
mine = state(300)
saving = dcp.async_save(mine, storage_writer=writer, planner=DirectSavePlanner(), async_stager=writer.stager())
for tensor in (*mine["replicated"].values(), mine["big"]):  # type: ignore[attr-defined]
    tensor.zero_()
saving.result()
assert writer.last is not None
print("async:", writer.last.host_bytes, flush=True)
dist.barrier()
print("end:", sorted(path.name for path in directory.iterdir()), flush=True)
dist.destroy_process_group()
