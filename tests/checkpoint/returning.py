"""A main function that begins async saves and returns at once: they go on while the interpreter ends."""

from __future__ import annotations

import concurrent.futures.thread
import multiprocessing
import warnings
from pathlib import Path
from typing import Any

import seeded
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan

from tunetool.checkpoint.writer import DirectWriter
from waiting import PATIENCE, until


def until_the_interpreter_ends() -> None:
    # Python has no public name for the moment from which on its executors take no more work.
    until(lambda: concurrent.futures.thread._shutdown, "the end of the main function")


class LatePlanner(DefaultSavePlanner):
    """All that the writer does, it does while the interpreter ends."""

    def create_local_plan(self) -> SavePlan:
        until_the_interpreter_ends()
        return super().create_local_plan()


class LateWriter(DirectWriter):
    """With the stager, the main function returns once all is copied: only the rest of the save can be late."""

    def finish(self, *args: Any, **kwargs: Any) -> None:
        until_the_interpreter_ends()
        super().finish(*args, **kwargs)


def begin_saves(rank: int, world: int, path: str, seed: int, megabytes: float, child: bool = False) -> None:
    """``child``: in a process of ``multiprocessing``, which ends otherwise than a program does."""
    if child:
        given = (rank, world, path, seed, megabytes)
        run_to_its_end(multiprocessing.get_context("fork").Process(target=begin_saves, args=given))
        return
    warnings.simplefilter("ignore")
    state = seeded.state(seed, megabytes)
    # Its buffers have another size than those of the other save, so it finds none that are idle.
    writer = DirectWriter(Path(path) / "whole", threads=2, buffer_bytes=2 << 20)
    dcp.async_save(state, storage_writer=writer, planner=LatePlanner())
    writer = LateWriter(Path(path) / "copied", threads=2, buffer_bytes=1 << 20)
    dcp.async_save(state, storage_writer=writer, async_stager=writer.stager())


def run_to_its_end(process: Any) -> None:
    process.start()
    process.join(PATIENCE)
    process.kill()
    process.join()
    assert process.exitcode == 0, process.exitcode
