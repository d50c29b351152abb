"""torch.distributed.checkpoint with torch's own FileSystemWriter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from tunetool.bench.checkpoint.engines.base import Done, Plain, State
from tunetool.bench.checkpoint.engines.files import fsync_names
from tunetool.bench.checkpoint.engines.ranks import alone, barrier, rank_and_world
from tunetool.checkpoint.steps import fsync

METADATA = ".metadata"


def finish(directory: Path) -> None:
    """Sync what torch leaves out with ``sync_files=True``, on every rank: the directory is never fsynced, and
    `.metadata` is fsynced with its last bytes, of a small one all, still in Python's buffer (seen in torch 2.13).
    """
    if rank_and_world()[0] == 0:
        fsync(directory / METADATA)
    fsync_names(directory)
    barrier()


def commit(writer: Any, metadata: Any, ranks: Any) -> None:
    """End a save by nvidia-resiliency-ext's or Megatron-core's writer, whose processes write, on every rank: all learn
    whether all have written, and the first writes `.metadata`.
    """

    def written() -> Any:
        results = writer.retrieve_write_results()
        if isinstance(results, tuple):
            raise results[0]
        return results

    ranks.all_reduce("write", written, lambda results: writer.finish(metadata, results))


def load_dcp(like: State, directory: Path) -> State:
    """``dcp.load`` with torch's reader, in rank_and_world."""
    dcp.load(like, storage_reader=dcp.FileSystemReader(directory), no_dist=alone())
    return like


class ReadByTorch(Plain):
    """What torch's FileSystemWriter wrote, by its own reader."""

    def load(self, like: State, directory: Path) -> State:
        """See ``Engine``."""
        return load_dcp(like, directory)


class Dcp(ReadByTorch):
    """``dcp.save``: ``single`` writes one file per thread and rank, else one per tensor."""

    def __init__(self, threads: int, single: bool) -> None:
        self.name = f"dcp-t{threads}-{'single' if single else 'multi'}"
        self._threads, self._single = threads, single

    def save(self, state: State, directory: Path) -> Done:
        """See ``Engine``. Over an existing checkpoint torch writes into its data files: a crash leaves none whole."""
        writer = dcp.FileSystemWriter(
            directory, single_file_per_rank=self._single, sync_files=True, thread_count=self._threads
        )
        dcp.save(state, storage_writer=writer, no_dist=alone())
        finish(directory)
        return Done()
