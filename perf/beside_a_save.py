"""What a drain, or a replication to another node, costs a save that begins meanwhile.

    .venv/bin/python perf/beside_a_save.py --target SCRATCH [--bulk DIR] [--size 512MiB]
    .venv/bin/python perf/beside_a_save.py --target SCRATCH --peer HOST [--ssh "ssh -p 2222"] [--size 256MiB]

The first: torch's own save, durable when it ends (files and directory fsynced), alone, beside a drain of an older step
that pauses for it, and beside one that does not. The second: `DirectWriter`, asynchronously, alone and while an older
step is on its way to the peer; a whole replication of that step; and rsync of the same files with the same options,
synced, which is all that the transport can. The older step is four times as large. HOST has the same SCRATCH, and this
Python with tunetool. All is removed at the end.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from rounds import Arm, Sample, output, program, sample
from tunetool.checkpoint import DirectSavePlanner, DirectWriter, Replica, drain, replicate, saving
from tunetool.checkpoint.replica_worker import RSYNC
from tunetool.checkpoint.steps import fsync_directory
from tunetool.node.units import parse_size

ALONE, BESIDE = "alone", "beside"


def of_size(size: int) -> dict[str, torch.Tensor]:
    return {f"weight{index}": torch.randn(size // 8 // 4) for index in range(8)}


def drains(asked: argparse.Namespace, scratch: Path, held: ExitStack) -> dict[str, Arm]:
    bulk = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="tunetool-bulk-", dir=asked.bulk)))
    state = of_size(parse_size(asked.size))
    dcp.save(of_size(4 * parse_size(asked.size)), storage_writer=dcp.FileSystemWriter(scratch / "step_0"))

    def save(state_of_drain: str, announced: bool) -> Iterable[Sample]:
        path = scratch / "step_1"
        with saving(scratch) if announced else nullcontext():
            began = time.perf_counter()
            dcp.save(state, storage_writer=dcp.FileSystemWriter(path))
            fsync_directory(path)
            seconds = time.perf_counter() - began
        shutil.rmtree(path)
        yield sample("time", seconds, way="drain", state=state_of_drain)

    def beside(state_of_drain: str, announced: bool) -> Iterable[Sample]:
        os.sync()
        work = drain(scratch / "step_0", bulk)
        try:
            while not (parts := list(bulk.glob(".draining-*/.part-0-*"))) or parts[0].stat().st_size < 32 * 2**20:
                time.sleep(0.001)
                if not work.running:
                    raise RuntimeError(f"the drain ended before the save began: {work.wait()}")
            yield from save(state_of_drain, announced)
        finally:
            work.stop()
            for left in bulk.iterdir():
                shutil.rmtree(left)

    def alone() -> Iterable[Sample]:
        os.sync()
        return save(ALONE, True)

    unpaused = f"{BESIDE}, without a pause"
    return {ALONE: alone, BESIDE: partial(beside, BESIDE, True), unpaused: partial(beside, unpaused, False)}


def replications(asked: argparse.Namespace, scratch: Path, held: ExitStack) -> dict[str, Arm]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    held.callback(dist.destroy_process_group)
    state, older, ssh = {"model": of_size(parse_size(asked.size))}, scratch / "step_0", shlex.split(asked.ssh)
    whole = {"model": of_size(4 * parse_size(asked.size))}
    dcp.save(whole, storage_writer=DirectWriter(older), planner=DirectSavePlanner())
    here = shlex.quote(str(scratch))

    def there(script: str) -> str:
        argv = [*ssh, asked.peer, script]
        done = subprocess.run(argv, check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return done.stdout

    def clean() -> None:
        there(f"rm -rf {here} && mkdir -p {here}")

    def started() -> Replica:
        work = replicate(older, peer=asked.peer, ssh=ssh)
        held.callback(work.stop)
        return work

    def save(state_of_save: str) -> Iterable[Sample]:
        writer, planner = DirectWriter(scratch / "step_1"), DirectSavePlanner()
        began = time.perf_counter()
        future = dcp.async_save(state, storage_writer=writer, planner=planner, async_stager=writer.stager())
        yield sample("stall", time.perf_counter() - began, way="replica", state=state_of_save)
        future.result()
        yield sample("time", time.perf_counter() - began, way="replica", state=state_of_save)
        shutil.rmtree(scratch / "step_1")

    def beside() -> Iterable[Sample]:
        clean()
        work = started()
        while not there(f"ls {here}/.replicas/*/.draining-*/*.distcp"):
            if not work.running:
                raise RuntimeError(f"the replication ended before the save began: {work.wait()}")
        yield from save(BESIDE)
        if not work.running:
            raise RuntimeError("the replication ended before the save did: give another --size")
        work.stop()

    def replication() -> Iterable[Sample]:
        clean()
        began = time.perf_counter()
        started().wait(check=True)
        yield sample("time", time.perf_counter() - began, way="replica", part="replication")

    def transport() -> Iterable[Sample]:
        clean()
        began = time.perf_counter()
        output(*RSYNC, "--recursive", f"--rsh={asked.ssh}", f"{older}/", f"{asked.peer}:{scratch}/plain/")
        there("sync")
        yield sample("time", time.perf_counter() - began, way="replica", part="transport")

    held.callback(there, f"rm -rf {here}")
    for _ in range(3):
        list(save(ALONE))
    return {ALONE: lambda: save(ALONE), BESIDE: beside, "replication": replication, "transport": transport}


def prepare(asked: argparse.Namespace, folder: Path, held: ExitStack) -> dict[str, Arm]:
    warnings.simplefilter("ignore")
    return replications(asked, folder, held) if asked.peer else drains(asked, folder, held)


if __name__ == "__main__":
    program(prepare, bulk="/var/tmp", peer="", ssh="ssh", size="512MiB")
