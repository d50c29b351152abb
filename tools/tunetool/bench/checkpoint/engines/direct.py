"""tunetool.checkpoint, by ``dcp.save`` and ``dcp.async_save``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tunetool.bench.checkpoint.engines.base import Context, Done, Pending, State, Waiting
from tunetool.bench.checkpoint.engines.ranks import alone, barrier
from tunetool.errors import TunetoolError


class Direct:
    """``DirectWriter`` and ``DirectReader`` with their defaults; durable when ``dcp.save`` returns."""

    name = "direct"
    remark = ""

    def unavailable(self, context: Context) -> str | None:
        """If the library cannot be imported."""
        del context
        try:
            from tunetool.checkpoint import DirectReader, DirectSavePlanner, DirectWriter
        except (ImportError, TunetoolError) as error:
            return f"tunetool.checkpoint cannot be imported: {error}"
        del DirectReader, DirectSavePlanner, DirectWriter
        return None

    def save(self, state: State, directory: Path) -> Pending:
        """See ``Engine``."""
        from tunetool.checkpoint import DirectSavePlanner, DirectWriter

        dcp.save(state, storage_writer=DirectWriter(directory), planner=DirectSavePlanner(), no_dist=alone())
        barrier()
        return Done()

    def load(self, like: State, directory: Path) -> State:
        """See ``Engine``."""
        from tunetool.checkpoint import DirectLoadPlanner, DirectReader

        dcp.load(like, storage_reader=DirectReader(directory), planner=DirectLoadPlanner(), no_dist=alone())
        return like

    def close(self) -> None:
        """Free the pinned buffers, which the library keeps for the next save."""
        from tunetool.checkpoint import release_buffers

        release_buffers()


class DirectGds(Direct):
    """``direct`` by GPUDirect Storage: large tensors never pass through the host's memory."""

    name = "direct-gds"

    def unavailable(self, context: Context) -> str | None:
        """Why it cannot run: no GPU, no cuFile, or a file system that cuFile refuses. Tried with a small tensor."""
        missing = super().unavailable(context)
        if missing or context.device == "cpu":
            return missing or "it is for a state on a GPU"
        import torch

        from tunetool.checkpoint import DirectWriter

        directory = context.directory / f".gds-{context.rank}"
        try:
            dcp.save(
                {"probe": torch.zeros(1 << 20, device="cuda")},
                storage_writer=DirectWriter(directory, gds=True),
                no_dist=True,
            )
        except TunetoolError as error:
            return error.message
        except CheckpointException as error:
            return str(next(iter(error.failures.values()))[0])
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return None

    def save(self, state: State, directory: Path) -> Pending:
        """See ``Engine``."""
        from tunetool.checkpoint import DirectSavePlanner, DirectWriter

        dcp.save(state, storage_writer=DirectWriter(directory, gds=True), planner=DirectSavePlanner(), no_dist=alone())
        barrier()
        return Done()


class DirectAsync(Direct):
    """``direct`` by ``dcp.async_save``: a thread writes the copy in host memory."""

    name = "direct-async"

    def __init__(self) -> None:
        self._group: Any = None

    def save(self, state: State, directory: Path) -> Pending:
        """See ``Engine``."""
        from tunetool.checkpoint import DirectSavePlanner, DirectWriter

        if self._group is None and not alone():
            # Its collectives run beside the training loop's, so not in the loop's group.
            self._group = dist.new_group(backend="gloo")
        writer = DirectWriter(directory)
        future = dcp.async_save(
            state,
            storage_writer=writer,
            async_stager=writer.stager(),
            planner=DirectSavePlanner(),
            process_group=self._group,
            no_dist=alone(),
        )

        def durable() -> None:
            future.result()
            barrier()

        return Waiting(durable)
