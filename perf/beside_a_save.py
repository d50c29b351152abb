"""What a drain, or a replication to another node, costs a save that begins meanwhile.

    .venv/bin/python perf/beside_a_save.py --target SCRATCH [--bulk DIR] [--size 512MiB]
    .venv/bin/python perf/beside_a_save.py --target SCRATCH --peer HOST [--ssh "ssh -p 2222"] [--size 256MiB]

`DirectWriter` saves asynchronously, alone and while an older step, four times as large, is drained or is on its way to
the peer. There also a whole replication of that step, and rsync of the same files with the same options, synced, which
is all that the transport can. HOST has the same SCRATCH, and this Python with tunetool. All is removed at the end.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from rounds import Arms, Call, Samples, output, program, sample, timed
from tunetool.checkpoint import DirectSavePlanner, DirectWriter, Drain, Replica, drain, replicate
from tunetool.checkpoint.replica_worker import RSYNC
from tunetool.node.units import parse_size

MOVED = 32 * 2**20
"""Bytes of a drain after which the save begins."""
Saving = Callable[[str], Samples]


def of_size(size: int) -> dict[str, torch.Tensor]:
    return {f"weight{index}": torch.randn(size // 8 // 4) for index in range(8)}


def save(tensors: dict[str, torch.Tensor], path: Path, way: str, state: str) -> Samples:
    os.sync()
    writer, planner, began = DirectWriter(path), DirectSavePlanner(), time.perf_counter()
    future = dcp.async_save(tensors, storage_writer=writer, planner=planner, async_stager=writer.stager())
    yield sample("stall", time.perf_counter() - began, way=way, state=state)
    future.result()
    yield sample("time", time.perf_counter() - began, way=way, state=state)
    shutil.rmtree(path)


def beside(saving: Saving, work: Drain | Replica, moving: Callable[[], object]) -> Samples:
    """A save while that work moves bytes."""
    try:
        while work.running and not moving():
            time.sleep(0.001)
        taken = list(saving("beside")) if work.running else []
        if not work.running:
            raise RuntimeError("the copy ended before the save did: give another --size")
        return taken
    finally:
        work.stop()


def beside_a_drain(call: Call, older: Path, saving: Saving) -> Arms:
    def turn() -> Samples:
        with tempfile.TemporaryDirectory(prefix="tunetool-bulk-", dir=call.asked.bulk) as bulk:
            parts = partial(Path(bulk).glob, ".draining-*/.part-*")
            return beside(saving, drain(older, bulk), lambda: sum(each.stat().st_size for each in parts()) >= MOVED)

    return {"beside": turn}


def beside_a_replication(call: Call, older: Path, saving: Saving) -> Arms:
    peer, ssh, here = call.asked.peer, shlex.split(call.asked.ssh), shlex.quote(str(call.folder))

    def there(script: str) -> str:
        return output(*ssh, peer, script, codes=range(256))  # what is not there yet is no error

    def clean() -> None:
        there(f"rm -rf {here} && mkdir -p {here}")

    def start() -> Replica:
        work = replicate(older, peer=peer, ssh=ssh)
        call.held.callback(work.stop)  # also after Ctrl-C
        return work

    def disturbed() -> Samples:
        clean()
        return beside(saving, start(), partial(there, f"ls {here}/.replicas/*/.draining-*/*.distcp"))

    def transported() -> None:
        output(*RSYNC, "--recursive", f"--rsh={call.asked.ssh}", f"{older}/", f"{peer}:{call.folder}/plain/")
        there("sync")

    def whole(part: str, act: Callable[[], object]) -> Samples:
        clean()
        yield sample("time", timed(act)[1], way="replica", part=part)

    call.held.callback(there, f"rm -rf {here}")
    return {
        "beside": disturbed,
        "replication": partial(whole, "replication", lambda: start().wait(check=True)),
        "transport": partial(whole, "transport", transported),
    }


def prepare(call: Call) -> Arms:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    call.held.callback(dist.destroy_process_group)
    size, older = parse_size(call.asked.size), call.folder / "step_0"
    dcp.save(of_size(4 * size), storage_writer=DirectWriter(older), planner=DirectSavePlanner())
    saving = partial(save, of_size(size), call.folder / "step_1", "replica" if call.asked.peer else "drain")
    for _ in range(3):
        list(saving("alone"))
    further = beside_a_replication if call.asked.peer else beside_a_drain
    return {"alone": partial(saving, "alone"), **further(call, older, saving)}


if __name__ == "__main__":
    program(prepare, bulk="/var/tmp", peer="", ssh="ssh", size="512MiB")
