"""FSDP's two kinds of checkpoint, by torch's current interface (``torch.distributed.checkpoint.state_dict``).

They are the two methods of the widely copied ``FSDPCheckpointer``, corrected. There ``save_consolidated`` calls
``state_dict()`` on rank 0 only; it gathers from every rank, so two ranks deadlock. ``save_sharded`` passes
``sync_files=False`` as "async write"; it only leaves the fsync out. Neither fsyncs or renames anything, and the
consolidated file holds no optimizer.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from tunetool.bench.checkpoint.engines.base import Context, Done, Plain, State
from tunetool.bench.checkpoint.engines.dcp import ReadByTorch, finish
from tunetool.bench.checkpoint.engines.files import write_durably
from tunetool.bench.checkpoint.engines.ranks import alone, barrier, host_bytes, lacks_memory, rank_and_world

THREADS = 4
"""Threads, as in the original."""
CONSOLIDATED = "consolidated.pt"


def module_of(state: State) -> nn.Module:
    """A module whose parameters are the state's tensors, under the same names and in the same memory."""
    root = nn.Module()
    for name, tensor in state.items():
        *path, leaf = name.split(".")
        node = root
        for part in path:
            if part not in node._modules:
                node.add_module(part, nn.Module())
            node = node.get_submodule(part)
        node.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return root


class FsdpSharded(ReadByTorch):
    """Every rank writes its shards, copied to the host beforehand: ``save_sharded``."""

    name = "fsdp-sharded"

    def unavailable(self, context: Context) -> str | None:
        """If a GPU's state does not fit into the host's memory."""
        return lacks_memory(host_bytes(context)) if context.device == "cuda" else None

    def save(self, state: State, directory: Path) -> Done:
        """See ``Engine``."""
        shards = get_model_state_dict(module_of(state), options=StateDictOptions(cpu_offload=True))
        writer = dcp.FileSystemWriter(directory, single_file_per_rank=True, sync_files=True, thread_count=THREADS)
        dcp.save(shards, storage_writer=writer, no_dist=alone())
        finish(directory)
        return Done()


class FsdpConsolidated(Plain):
    """Gathered and written by rank 0, which holds the whole state: ``save_consolidated``. Portable."""

    name = "fsdp-consolidated"
    remark = "rank 0 holds the state of all ranks in host memory"

    def unavailable(self, context: Context) -> str | None:
        """Why it cannot run: the whole state does not fit into the host's memory."""
        copied = context.device == "cuda" or context.world > 1
        return lacks_memory(context.state_bytes * context.world) if copied else None

    def save(self, state: State, directory: Path) -> Done:
        """See ``Engine``."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(module_of(state), options=options)
        if rank_and_world()[0] == 0:
            write_durably(directory / CONSOLIDATED, lambda path: torch.save(whole, path))
        barrier()
        return Done()

    def load(self, like: State, directory: Path) -> State:
        """See ``Engine``. Rank 0 reads, and each rank gets its part of every tensor from it."""
        whole: State = {}
        if rank_and_world()[0] == 0:
            whole = torch.load(directory / CONSOLIDATED, map_location="cpu", weights_only=True, mmap=False)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=not alone())
        set_model_state_dict(module_of(like), whole, options=options)
        return like
