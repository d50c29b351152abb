"""Megatron-core's ``dist_checkpointing`` with its format ``torch_dist``, the default of Megatron-LM."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from tunetool.bench.checkpoint.engines.base import Context, Done, Plain, State
from tunetool.bench.checkpoint.engines.dcp import commit, finish
from tunetool.bench.checkpoint.engines.files import fsync_below
from tunetool.bench.checkpoint.engines.ranks import (
    alone,
    barrier,
    device_of,
    fill,
    host_bytes,
    lacks_memory,
    rank_and_world,
)
from tunetool.bench.checkpoint.engines.tensors import local
from tunetool.bench.checkpoint.states import rows_of


class MegatronDist(Plain):
    """``dist_checkpointing.save`` and ``load`` of ``ShardedTensor``, by two processes of each rank as by default.

    On the CPU two of its steps are ours: they ask for a GPU, and have the same effect (``_without_gpu``).
    """

    name = "megatron-dist"
    remark = "files but the tensors' synced by tunetool"

    def unavailable(self, context: Context) -> str | None:
        """If it cannot be imported, there is no torch.distributed, or a GPU's state does not fit into memory."""
        try:
            from megatron.core import dist_checkpointing
        except ImportError as error:
            return f"Megatron-core cannot be imported: {error}: pip install -U megatron-core"
        del dist_checkpointing
        if alone():
            return "Megatron-core needs torch.distributed: start the ranks by torchrun"
        return lacks_memory(host_bytes(context)) if context.device == "cuda" else None

    def save(self, state: State, directory: Path) -> Done:
        """See ``Engine``."""
        from megatron.core import dist_checkpointing

        directory.mkdir(parents=True, exist_ok=True)
        barrier()
        strategy = None if device_of(state).type == "cuda" else _without_gpu()
        dist_checkpointing.save(_sharded(state), str(directory), strategy)
        if rank_and_world()[0] == 0:
            fsync_below(directory)
        finish(directory)
        return Done()

    def load(self, like: State, directory: Path) -> State:
        """See ``Engine``."""
        from megatron.core import dist_checkpointing

        return fill(like, dist_checkpointing.load(_sharded(like), str(directory)), directory)

    def close(self) -> None:
        """End the process that carries results between its processes, which it would keep until the program ends."""
        writer: Any = sys.modules.get("megatron.core.dist_checkpointing.strategies.filesystem_async")
        if getattr(writer, "_results_queue", None) is not None:
            writer._results_queue = None


def _sharded(state: State) -> dict[str, Any]:
    """The state as Megatron describes it: where each part lies in its tensor, and which rank writes a replica."""
    from megatron.core.dist_checkpointing import ShardedTensor

    rank, world = rank_and_world()
    described = {}
    for name, tensor in state.items():
        part, start = local(tensor).detach(), [0] * tensor.ndim
        cut = isinstance(tensor, DTensor)
        if cut:
            start[0] = rows_of(tensor.shape[0], rank, world)[0]
        # No grid: the last rank may have fewer rows than the others.
        places = (tuple(part.shape), tuple(tensor.shape), tuple(start), None)
        if part.numel() or not cut:
            described[name] = ShardedTensor(name, part, part.dtype, *places, replica_id=0 if cut else rank)
    return described


def _without_gpu() -> Any:
    """The default strategy with the two steps that ask for a GPU replaced: its copy to the host ends with a wait for
    the device, and its ranks exchange by a tensor there whether all have written.
    """
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    class OnTheCpu(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # a class of a library without types
        def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any) -> Any:
            _, metadata, ranks = planned
            write, preload, arguments = writer.get_save_function_and_args()
            copy = None if preload is None else partial(preload.func, writer.write_buckets, False)
            return AsyncRequest(write, arguments, [partial(commit, writer, metadata, ranks)], preload_fn=copy)

    return OnTheCpu("torch_dist", 1)
