"""Ranks that save by ``Saver`` while one of their places fails, as functions for children of ``forks.py``."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from failing_disks import frozen

from tunetool.checkpoint import DirectSavePlanner, Saver
from tunetool.checkpoint import writer as writer_module

NUMBERS = 1 << 20
"""Of the tensor that a rank alone has."""


def state_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {f"w{rank}": torch.full((NUMBERS,), 10.0 * step + rank), "same": torch.full((1000, 130), float(step))}


def lose_at_the_commit() -> None:
    """The coordinator's directory is gone once every rank has written."""
    content_of = writer_module.metadata_file.content_of

    def lose_it_first(metadata: Any, ranks: Any, where: Path, *rest: Any) -> Any:
        writer_module.metadata_file.content_of = content_of
        where.parent.rename(where.parent.with_name("away"))
        return content_of(metadata, ranks, where, *rest)

    writer_module.metadata_file.content_of = lose_it_first


def save_steps(
    rank: int,
    world: int,
    places: list[list[str]],
    meet: str,
    faults: dict[str, str],
    how: str,
    caching: bool,
    time_limit: float = 600,
) -> dict[str, Any]:
    """Save steps 1 to 5. ``faults``: what happens in a step on rank 1, or at the commit. Returns where each step is, and what was said."""
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    said: list[str] = []
    saver = Saver(
        places[rank],
        planner=lambda: DirectSavePlanner(enable_plan_caching=caching),
        on_failure=lambda failed: said.append(str(failed)),
        time_limit=time_limit,
        threads=2,
    )
    scratch, sync, saved = Path(places[rank][0]), writer_module.fsync_directory, []
    for step in range(1, 6):
        fault = faults.get(str(step), "")
        fault = fault if rank == (fault != "commit") else ""
        if fault == "commit":
            lose_at_the_commit()
        if fault == "full":
            with (scratch / "filler").open("wb") as stream:
                free = os.statvfs(scratch)
                os.posix_fallocate(stream.fileno(), 0, free.f_bavail * free.f_frsize)
        if fault == "late":

            def lose_it_first(directory: Path) -> None:
                writer_module.fsync_directory = sync
                directory.rename(directory.with_name("away"))
                sync(directory)

            writer_module.fsync_directory = lose_it_first
        if fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        state = state_of(rank, step)
        hanging = contextlib.ExitStack()
        if fault == "frozen":
            hanging.enter_context(frozen(scratch))
        if how == "sync":
            saved.append(saver.save(state, step))
        else:
            saver.save_async(state, step)
            for tensor in state.values():
                tensor.fill_(-1)  # training goes on, with its own collectives
                dist.all_reduce(tensor)
            saved.append(saver.wait())
        hanging.close()
        (scratch / "filler").unlink(missing_ok=True)
    saver.close()
    dist.destroy_process_group()
    return {"saved": [path and str(path) for path in saved], "said": said}
