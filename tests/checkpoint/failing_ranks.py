"""Two ranks that save together while a fault happens, as functions for children of ``forks.py``."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from tunetool.checkpoint.saver_lock import NAME
from tunetool.checkpoint.writer import DirectWriter
from waiting import until

BYTES = 24 << 20
"""What each rank holds that the other rank does not have."""
FILLER = "filler"
"""The file of somebody else that takes all space, beside the step's directory."""
Act = Callable[[], None]


def save_own(
    rank: int,
    world: int,
    paths: list[str],
    meet: str,
    seed: int,
    what: str = "",
    who: int = 0,
    lives_on: bool = False,
) -> str:
    """Save to the rank's path. ``what`` happens on rank ``who`` after all checks of its own part, when the other rank has
    written all of its bytes. ``lives_on``: save once more after the failure."""
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    directory, state = Path(paths[rank]), {f"w{rank}": torch.full((BYTES // 4,), float(seed + rank))}
    pids: list[Any] = [None] * world
    dist.all_gather_object(pids, os.getpid())
    if what and rank == who:
        _before_the_first_file(_fault(what, Path(paths[1 - rank]), 1 - rank, pids[1 - rank]))
    writer = DirectWriter(directory, threads=2, buffer_bytes=1 << 20)
    failed = ""
    try:
        dcp.save(state, storage_writer=writer)
    except CheckpointException as error:
        if not lives_on:
            raise
        # The exception, with torch's frames, and the writer are kept alive.
        until(lambda: not (directory / NAME).exists())
        until(lambda: not list(directory.glob("*.distcp")))
        failed = str(next(iter(error.failures)))
        dist.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
        dcp.save(state, storage_writer=writer)
    dist.destroy_process_group()
    return failed


def _before_the_first_file(act: Act) -> None:
    """``act`` in the thread that makes the first data file, just before it."""
    pending = [act]

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(".distcp") and pending:
            pending.pop()()

    sys.addaudithook(look)


def _fault(what: str, other_directory: Path, other: int, other_pid: int) -> Act:
    """The fault, once the other rank has written as many bytes as it will beyond what is there now."""
    before = set(other_directory.glob("*"))

    def written() -> bool:
        new = set(other_directory.glob(f"__{other}_*")) - before
        return sum(path.stat().st_blocks * 512 for path in new) >= BYTES

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def fill() -> None:
        free = os.statvfs(other_directory)
        with (other_directory.parent / FILLER).open("wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, free.f_bavail * free.f_frsize)

    def kill_all() -> None:
        os.kill(other_pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    act = {
        "EFBIG": limit,
        "ENOSPC": fill,
        "it is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "all are killed": kill_all,
    }[what]

    def once_the_other_has_written() -> None:
        until(written, "the bytes of the other rank")
        act()

    return once_the_other_has_written
