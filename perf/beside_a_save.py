"""What a drain, or a replication to another node, costs a save that begins meanwhile.

    .venv/bin/python perf/beside_a_save.py --target SCRATCH [--bulk DIR] [--size 512MiB]
    .venv/bin/python perf/beside_a_save.py --target SCRATCH --peer HOST [--ssh "ssh -p 2222"] [--size 256MiB]

`DirectWriter` saves asynchronously, alone and while an older step, four times as large, is drained or is on its way to
the peer. There also a whole replication of that step, and rsync of the same files with the same options, synced, which
is all that the transport can. HOST has the same SCRATCH, and this Python with tunetool. All is removed at the end.
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
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from rounds import Arm, Sample, output, program, sample
from tunetool.checkpoint import DirectSavePlanner, DirectWriter, Drain, Replica, drain, replicate
from tunetool.checkpoint.replica_worker import RSYNC
from tunetool.node.units import parse_size

MOVED = 32 * 2**20
"""Bytes of a drain after which the save begins."""
Started = Callable[[], Drain | Replica]


def of_size(size: int) -> dict[str, torch.Tensor]:
    return {f"weight{index}": torch.randn(size // 8 // 4) for index in range(8)}


def save(way: str, state: str, tensors: dict[str, torch.Tensor], path: Path) -> Iterable[Sample]:
    os.sync()
    writer, planner = DirectWriter(path), DirectSavePlanner()
    began = time.perf_counter()
    future = dcp.async_save(tensors, storage_writer=writer, planner=planner, async_stager=writer.stager())
    yield sample("stall", time.perf_counter() - began, way=way, state=state)
    future.result()
    yield sample("time", time.perf_counter() - began, way=way, state=state)
    shutil.rmtree(path)


def beside(
    saving: Callable[[str], Iterable[Sample]], started: Started, moving: Callable[[], object], clean: Callable[[], None]
) -> Iterable[Sample]:
    """A save while that work moves bytes."""
    clean()
    work = started()
    try:
        while work.running and not moving():
            time.sleep(0.001)
        if not work.running:
            raise RuntimeError(f"the copy ended before the save began: {work.wait()}")
        yield from saving("beside")
        if not work.running:
            raise RuntimeError("the copy ended before the save did: give another --size")
    finally:
        work.stop()
        clean()


def prepare(asked: argparse.Namespace, folder: Path, held: ExitStack) -> dict[str, Arm]:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    held.callback(dist.destroy_process_group)
    tensors, older, ssh = of_size(parse_size(asked.size)), folder / "step_0", shlex.split(asked.ssh)
    dcp.save(of_size(4 * parse_size(asked.size)), storage_writer=DirectWriter(older), planner=DirectSavePlanner())
    way = "replica" if asked.peer else "drain"

    def saving(state: str) -> Iterable[Sample]:
        return save(way, state, tensors, folder / "step_1")

    for _ in range(3):
        list(saving("alone"))
    if not asked.peer:
        bulk = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="tunetool-bulk-", dir=asked.bulk)))

        def moved() -> bool:
            return sum(each.stat().st_size for each in bulk.glob(".draining-*/.part-*")) >= MOVED

        def empty() -> None:
            for left in bulk.iterdir():
                shutil.rmtree(left)

        draining = partial(beside, saving, lambda: drain(older, bulk), moved, empty)
        return {"alone": partial(saving, "alone"), "beside": draining}
    here = shlex.quote(str(folder))

    def there(script: str) -> str:
        argv = [*ssh, asked.peer, script]
        return subprocess.run(argv, check=False, stdout=-1, stderr=subprocess.DEVNULL, text=True).stdout

    def clean() -> None:
        there(f"rm -rf {here} && mkdir -p {here}")

    def replication() -> Iterable[Sample]:
        clean()
        began = time.perf_counter()
        work = replicate(older, peer=asked.peer, ssh=ssh)
        held.callback(work.stop)  # also after Ctrl-C
        work.wait(check=True)
        yield sample("time", time.perf_counter() - began, way="replica", part="replication")

    def transport() -> Iterable[Sample]:
        clean()
        began = time.perf_counter()
        output(*RSYNC, "--recursive", f"--rsh={asked.ssh}", f"{older}/", f"{asked.peer}:{folder}/plain/")
        there("sync")
        yield sample("time", time.perf_counter() - began, way="replica", part="transport")

    held.callback(there, f"rm -rf {here}")
    arriving = partial(there, f"ls {here}/.replicas/*/.draining-*/*.distcp")
    replicating = partial(beside, saving, lambda: replicate(older, peer=asked.peer, ssh=ssh), arriving, clean)
    return {
        "alone": partial(saving, "alone"),
        "beside": replicating,
        "replication": replication,
        "transport": transport,
    }


if __name__ == "__main__":
    program(prepare, bulk="/var/tmp", peer="", ssh="ssh", size="512MiB")
