"""What does a replication cost the next save, and how near does it come to its transport?

    .venv/bin/python perf/replica.py --scratch DIR --peer HOST [--ssh "ssh -p 2222"] [--size 256MiB] [--rounds 12]

Interleaved, in a new order each round: an asynchronous save alone; the same while an older step, four times as large,
is on its way to the peer; a whole replication of that step; and rsync of the same files with the same options, synced,
which is all that the transport can. HOST has the same DIR, and this Python with tunetool. All is removed at the end.
"""

from __future__ import annotations

import argparse
import random
import shlex
import shutil
import subprocess
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from entry import program
from tunetool.checkpoint import DirectSavePlanner, DirectWriter, Replica, replicate
from tunetool.checkpoint.replica_worker import RSYNC
from tunetool.node.units import parse_size
from tunetool.tune.pairs import interval_of

STALL, SHARE = 1.05, 0.8
ALONE, BESIDE, REPLICATION, TRANSPORT = "alone", "beside a replication", "replication", "transport"


class Rounds:
    def __init__(self, scratch: Path, peer: str, ssh: list[str], size: int) -> None:
        self.scratch, self.peer, self.ssh = scratch, peer, ssh
        self.state = {"model": {str(number): torch.randn(size // 8 // 4) for number in range(8)}}
        self.older, self.seconds = scratch / "step_0", dict[str, list[float]]()
        self.work: Replica | None = None
        state = {"model": {str(number): torch.randn(size // 8) for number in range(8)}}
        dcp.save(state, storage_writer=DirectWriter(self.older), planner=DirectSavePlanner())

    def note(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    def save(self, name: str) -> None:
        path = self.scratch / "step_1"
        writer = DirectWriter(path)
        began = time.perf_counter()
        saving = dcp.async_save(
            self.state, storage_writer=writer, planner=DirectSavePlanner(), async_stager=writer.stager()
        )
        self.note(f"{name}: stall", time.perf_counter() - began)
        saving.result()
        self.note(f"{name}: durable", time.perf_counter() - began)
        shutil.rmtree(path)

    def started(self) -> Replica:
        self.work = replicate(self.older, peer=self.peer, ssh=self.ssh)
        return self.work

    def end(self) -> None:
        """Also after Ctrl-C: nothing goes on, and nothing stays on the peer."""
        if self.work is not None:
            self.work.stop()
        self.there(f"rm -rf {shlex.quote(str(self.scratch))}")

    def turn(self, arm: str) -> None:
        self.there(f"rm -rf {shlex.quote(str(self.scratch))} && mkdir -p {shlex.quote(str(self.scratch))}")
        began = time.perf_counter()
        if arm == ALONE:
            self.save(arm)
        elif arm == BESIDE:
            work = self.started()
            arriving = f"{shlex.quote(str(self.scratch))}/.replicas/*/.draining-*/*.distcp"
            while not self.there(f"ls {arriving}"):
                if not work.running:
                    raise SystemExit(f"the replication ended before the save began: {work.wait()}")
            self.save(arm)
            if not work.running:
                raise SystemExit("the replication ended before the save did: give another --size")
            work.stop()
        elif arm == REPLICATION:
            self.started().wait(check=True)
            self.note(arm, time.perf_counter() - began)
        else:
            target = f"{self.peer}:{self.scratch}/plain/"
            subprocess.run(
                [*RSYNC, "--recursive", f"--rsh={shlex.join(self.ssh)}", f"{self.older}/", target], check=True
            )
            self.there("sync")
            self.note(arm, time.perf_counter() - began)

    def there(self, script: str) -> str:
        argv = [*self.ssh, self.peer, script]
        done = subprocess.run(argv, check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--ssh", type=shlex.split, default=["ssh"])
    parser.add_argument("--size", type=parse_size, default=parse_size("256MiB"))
    parser.add_argument("--rounds", type=int, default=12)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    drawn = random.Random(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(prefix="tunetool-replica-", dir=asked.scratch) as folder:
        rounds = Rounds(Path(folder), asked.peer, asked.ssh, asked.size)
        try:
            for _ in range(3):
                rounds.save("warm-up")
            for number in range(asked.rounds):
                for arm in drawn.sample([ALONE, BESIDE, REPLICATION, TRANSPORT], 4):
                    rounds.turn(arm)
                row = ", ".join(f"{name} {values[-1]:.3f} s" for name, values in rounds.seconds.items())
                print(f"round {number + 1}: {row}", flush=True)
        finally:
            rounds.end()
    dist.destroy_process_group()
    took = rounds.seconds

    def over(one: str, other: str) -> list[float]:
        return [a / b for a, b in zip(took[one], took[other], strict=True)]

    good = True
    for what, ratios, most in (
        ("stall of an async save beside a replication, x alone", over(f"{BESIDE}: stall", f"{ALONE}: stall"), STALL),
        ("until it is durable, likewise", over(f"{BESIDE}: durable", f"{ALONE}: durable"), STALL),
        ("seconds of a replication, x its transport's", over(REPLICATION, TRANSPORT), 1 / SHARE),
    ):
        of = interval_of(ratios)
        print(f"{what}: {of.value:.2f} [{of.low:.2f} to {of.high:.2f}, {of.level:.0%}]; at most {most:.2f} wanted")
        good = good and of.high <= most
    return 0 if good else 1


if __name__ == "__main__":
    program(main)
