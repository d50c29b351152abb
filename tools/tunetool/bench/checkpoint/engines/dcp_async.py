"""``dcp.async_save``: copies to the host during the stall; a thread or a process writes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor, staging, state_dict_saver

from tunetool.bench.checkpoint.engines.base import Context, State, Waiting
from tunetool.bench.checkpoint.engines.dcp import finish, load_dcp
from tunetool.bench.checkpoint.engines.files import allow_open_files
from tunetool.bench.checkpoint.engines.ranks import (
    alone,
    device_of,
    host_bytes,
    lacks_memory,
    rank_and_world,
    ranks_here,
)
from tunetool.bench.checkpoint.engines.tensors import local_parts
from tunetool.node.units import format_size_binary

THREADS = 4
"""Threads of the writer."""
SHARED = Path("/dev/shm")


class DcpAsync:
    """torch's stager with the best settings it has: buffers kept between saves, shared with the process, and pinned for
    a GPU where shared memory has room.
    """

    remark = "keeps a second copy of the state in host memory, and makes it at its first save"

    def __init__(self, kind: str) -> None:
        self.name = f"dcp-async-{kind}"
        self._process = kind == "process"
        self._stager: Any = None
        self._group: Any = None

    def unavailable(self, context: Context) -> str | None:
        """If torch is too old, the copy does not fit, or the process could not start or get the copy."""
        if not hasattr(staging, "DefaultStager") or not hasattr(state_dict_saver, "AsyncCheckpointerType"):
            return f"torch {torch.__version__} has no DefaultStager"
        if self._process and alone():
            return "torch's checkpoint process needs torch.distributed: start the ranks by torchrun"
        need, free = host_bytes(context), shutil.disk_usage(SHARED).free
        if self._process and need > free:
            return f"the state is handed over in {SHARED}: {format_size_binary(need)}, {format_size_binary(free)} free"
        return lacks_memory(need)

    def save(self, state: State, directory: Path) -> Waiting:
        """See ``Engine``."""
        if self._stager is None:
            self._stager = self._make_stager(state)
            # Its collectives run beside the training loop's, so not in the loop's group.
            self._group = None if alone() else dist.new_group(backend="gloo")
        try:
            future = self._start(state, directory)
        except KeyError:
            # torch 2.11 closes a stager after its save, and a closed stager cannot copy again.
            self._stager = self._make_stager(state)
            future = self._start(state, directory)

        def durable() -> None:
            future.result()
            finish(directory)

        return Waiting(durable)

    def _start(self, state: State, directory: Path) -> Any:
        kinds = state_dict_saver.AsyncCheckpointerType
        return dcp.async_save(
            state,
            storage_writer=dcp.FileSystemWriter(directory, sync_files=True, thread_count=THREADS),
            async_checkpointer_type=kinds.PROCESS if self._process else kinds.THREAD,
            async_stager=self._stager,
            process_group=self._group,
            no_dist=alone(),
        )

    def _make_stager(self, state: State) -> Any:
        cuda = device_of(state).type == "cuda"
        local_bytes = sum(part.nbytes for part in local_parts(state).values())
        room = shutil.disk_usage(SHARED).free >= local_bytes * ranks_here(rank_and_world()[1])
        shared = self._process or (cuda and room)
        if shared:
            allow_open_files()
        return staging.DefaultStager(
            staging.StagingOptions(
                # Pinned only where shared, as by torch's default: two small tensors on one page cannot both be pinned.
                use_pinned_memory=cuda and shared,
                use_shared_memory=shared,
                # The loop may change the state once `save` returns, so the copy is over by then.
                use_async_staging=False,
                use_non_blocking_copy=cuda,
            )
        )

    def load(self, like: State, directory: Path) -> State:
        """See ``Engine``."""
        return load_dcp(like, directory)

    def close(self) -> None:
        """Free the buffers and end the process, which torch would keep until the program ends."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None
        if self._process:
            _async_process_executor._CHECKPOINT_PROCESS = None
