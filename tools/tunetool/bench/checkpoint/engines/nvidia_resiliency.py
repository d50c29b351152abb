"""NVIDIA Resiliency Extension's ``FileSystemWriterAsync``: a process of its own copies during the stall, and writes."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from tunetool.bench.checkpoint.engines import NVIDIA
from tunetool.bench.checkpoint.engines.base import Context, State, Waiting
from tunetool.bench.checkpoint.engines.dcp import commit, finish, load_dcp
from tunetool.bench.checkpoint.engines.files import allow_open_files
from tunetool.bench.checkpoint.engines.ranks import alone, device_of, host_bytes, lacks_memory

THREADS = 8
"""Threads of the writer, and its files per rank."""


class NvidiaResiliency:
    """``AsyncCallsQueue`` with its persistent process and all caches that it has: of plans, of metadata, and of the
    tensors' handles. On a GPU the process reads the tensors there (CUDA IPC); on the CPU they are copied to shared
    memory.

    Its own last step (``save_state_dict_async_finalize``) needs a GPU and has the same effect as that here.
    """

    name = "nvidia-resiliency-ext"
    remark = "its process asks ten times a second whether a save is over; .metadata and directory synced by tunetool"

    def __init__(self) -> None:
        self._queue: Any = None
        self._plans: Any = None

    def unavailable(self, context: Context) -> str | None:
        """If it is too old, there is no torch.distributed, or its copy does not fit into memory."""
        try:
            from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
            from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import CheckpointMetadataCache
        except ImportError as error:
            return f"nvidia-resiliency-ext cannot be imported: {error}: {NVIDIA.install}"
        del CheckpointMetadataCache
        if "use_cpu_shm_for_gpu_tensors" not in inspect.signature(FileSystemWriterAsync).parameters:
            return f"nvidia-resiliency-ext is older than 0.7: {NVIDIA.install}"
        if alone():
            return "nvidia-resiliency-ext needs torch.distributed: start the ranks by torchrun"
        return lacks_memory(host_bytes(context))

    def save(self, state: State, directory: Path) -> Waiting:
        """See ``Engine``."""
        from nvidia_resiliency_ext.checkpointing.async_ckpt import core, filesystem_async, state_dict_saver

        on_gpu = device_of(state).type == "cuda"
        if self._queue is None:
            # Kept for the whole program by their class: a new process would be asked for tensors that it never got.
            filesystem_async.FileSystemWriterAsync.cleanup_tensor_caches()
            self._plans = state_dict_saver.CheckpointMetadataCache()
            self._queue = core.AsyncCallsQueue(persistent=True, cpu_shm_mode=not on_gpu)
        if on_gpu:
            # Another process reads the tensors, and knows nothing of this one's streams.
            torch.cuda.current_stream().synchronize()
        else:
            allow_open_files()
        writer = filesystem_async.FileSystemWriterAsync(
            directory,
            thread_count=THREADS,
            use_cached_data_structure=True,
            use_cpu_shm_for_gpu_tensors=not on_gpu,
        )
        _, metadata, ranks = state_dict_saver.save_state_dict_async_plan(
            state, writer, enable_cache=True, metadata_cache=self._plans
        )
        write, copy, arguments = writer.get_save_function_and_args()

        def done() -> None:
            commit(writer, metadata, ranks)
            finish(directory)

        self._queue.schedule_async_request(core.AsyncRequest(write, arguments, [done], {}, copy))
        return Waiting(lambda: self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True))

    def load(self, like: State, directory: Path) -> State:
        """See ``Engine``."""
        return load_dcp(like, directory)

    def close(self) -> None:
        """End the process, and with it the copy in host memory."""
        if self._queue is not None:
            self._queue.close()
            self._queue = None
