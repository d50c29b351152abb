"""One of two ranks that save together while a fault happens. Arguments: fault, rank, directory, meeting file, seed.

Each rank holds 24 MiB that the other rank does not have.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner

from tunetool.checkpoint.saver_lock import NAME
from tunetool.checkpoint.writer import DirectWriter

# This is a program of its own, without pytest's import path.
sys.path.append(str(Path(__file__).parents[1]))
from waiting import until

warnings.simplefilter("ignore")
torch.set_num_threads(1)
what, rank, directory, seed = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[5])
BYTES = 24 << 20


class Meanwhile(DefaultSavePlanner):
    """Calls a function just before the tensors are read, after all checks."""

    act: Callable[[], None] | None = None

    def resolve_data(self, write_item: Any) -> Any:
        if self.act is not None:
            self.act()
        return super().resolve_data(write_item)


def written_by(other: int) -> bool:
    """Whether all bytes of the other rank have blocks on the disk."""
    return sum(path.stat().st_blocks * 512 for path in directory.glob(f"__{other}_*")) >= BYTES


def fails() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def kills_all() -> None:
    until(lambda: written_by(1 - rank))
    os.kill(other_pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def dies() -> None:
    until(lambda: written_by(1 - rank))
    os.kill(os.getpid(), signal.SIGKILL)


dist.init_process_group("gloo", init_method=f"file://{sys.argv[4]}", rank=rank, world_size=2)
pids: list[Any] = [None, None]
dist.all_gather_object(pids, os.getpid())
other_pid = int(pids[1 - rank])
acts = {
    "rank 1 fails": (1, fails),
    "rank 0 fails": (0, fails),
    "all are killed": (1, kills_all),
    "rank 0 dies": (0, dies),
}
planner = Meanwhile()
acting, act = acts.get(what.removesuffix(" and lives on"), (None, None))
if rank == acting:
    planner.act = act
state = {f"w{rank}": torch.full((BYTES // 4,), seed + rank)}
writer = DirectWriter(directory, threads=2, buffer_bytes=1 << 20)
try:
    dcp.save(state, storage_writer=writer, planner=planner)
except CheckpointException as error:
    if not what.endswith("and lives on"):
        raise
    # The exception, with torch's frames, and the writer are kept alive.
    until(lambda: not (directory / NAME).exists())
    until(lambda: not list(directory.glob("*.distcp")))
    print(f"over: {next(iter(error.failures))}", flush=True)
    dist.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
    planner.act = None
    dcp.save(state, storage_writer=writer, planner=planner)
print("saved", flush=True)
dist.destroy_process_group()
