"""The part of the state that a rank writes and reads, for engines without support for ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tunetool.bench.checkpoint.engines.base import Context, State
from tunetool.bench.checkpoint.engines.files import write_durably
from tunetool.bench.checkpoint.engines.tensors import local, local_parts
from tunetool.checkpoint.space import host_memory_left
from tunetool.errors import CannotJudge
from tunetool.node.units import format_size_binary


def rank_and_world() -> tuple[int, int]:
    """This rank's number and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def alone() -> bool:
    """Whether there is only one rank: the value of torch's ``no_dist``."""
    return not dist.is_initialized()


def barrier() -> None:
    """Wait for every rank."""
    if dist.is_initialized():
        dist.barrier()


def ranks_here(world: int) -> int:
    """Number of ranks on this host; all ranks, unless torchrun's variables say otherwise."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def host_bytes(context: Context) -> int:
    """Bytes of the parts of all ranks on this host."""
    return context.state_bytes * ranks_here(context.world)


def lacks_memory(count: int) -> str | None:
    """Why an engine cannot run that needs ``count`` bytes of host memory beside the state; None if it can."""
    left = host_memory_left()
    if count <= left:
        return None
    return f"it takes {format_size_binary(count)} of host memory, {format_size_binary(left)} are left"


def device_of(state: State) -> torch.device:
    """The device of the state's tensors."""
    return local(next(iter(state.values()))).device


def owner(state: State) -> int:
    """The rank whose file holds this rank's part: itself for shards, rank 0 for replicas."""
    return rank_and_world()[0] if any(isinstance(tensor, DTensor) for tensor in state.values()) else 0


def file_of(state: State, directory: Path, suffix: str) -> Path:
    """The file that holds this rank's part."""
    return directory / f"rank{owner(state)}{suffix}"


def save_parts(state: State, directory: Path, suffix: str, write: Callable[[State, Path], None]) -> None:
    """One file per rank that holds a part of its own, durable on every rank when it returns."""
    if owner(state) == rank_and_world()[0]:
        parts = local_parts(state)
        write_durably(file_of(state, directory, suffix), lambda path: write(parts, path))
    barrier()


def fill(like: State, loaded: State, directory: Path) -> State:
    """Copy ``loaded`` into ``like``. Raises ``CannotJudge`` for a tensor that is not there or of another shape."""
    for name, tensor in like.items():
        into, part = local(tensor), loaded.get(name)
        if part is None or part.shape != into.shape:
            what = "no tensor" if part is None else f"another shape, {tuple(part.shape)}, of"
            raise CannotJudge(f"`{directory}` has {what} `{name}`", "was it saved from another state?")
        into.copy_(part)
    return like
