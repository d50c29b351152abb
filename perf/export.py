"""How near do `tunetool checkpoint export` and `import` come to fio's read and write?

    .venv/bin/python perf/export.py [--target /var/tmp] [--bytes 2GB] [--rounds 6] [--before CHECKOUT]

A step of a model's shapes is saved to the target, one file for each of four threads. In every round, each time in
another order: fio reads these files, a job for each; fio writes as many new ones; both at once; the step is exported
to four files, which are then imported. Past the page cache, but on a file system in memory. Seconds are by the
command's own clock, without Python's start. `--before`: the export of another checkout too.

A line for each goal: the figure's median, its interval over the rounds, the goal, and `held`, `missed`, or `not
decided`. Ends with 1 where a goal is missed, else with 3 where one is not decided. What fio does in both directions at
once is the limit where both share a disk or the processors: shares of that are said without a goal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from entry import program
from goals import figure, line, status
from tunetool.checkpoint import DirectSavePlanner, DirectWriter
from tunetool.checkpoint.memory_file_system import is_in_memory
from tunetool.measure.statistics import estimate
from tunetool.node.units import parse_size

SHARE = 0.8
FILES = 4
HIDDEN, INNER, ROWS = 2048, 5632, 512
READ, WRITE, BOTH, EXPORT, IMPORT, BEFORE = "fio reads", "fio writes", "fio does both", "export", "import", "before: "


def save(step: Path, size: int) -> None:
    """A model of some ``size`` bytes: the tensors of layers, until there are enough."""
    generator = torch.Generator().manual_seed(1)
    layer = {
        "q": (HIDDEN, HIDDEN),
        "k": (ROWS, HIDDEN),
        "up": (INNER, HIDDEN),
        "down": (HIDDEN, INNER),
        "norm": (HIDDEN,),
    }
    state: dict[str, torch.Tensor] = {}
    while sum(tensor.nbytes for tensor in state.values()) < size:
        number = len(state) // len(layer)
        for name, shape in layer.items():
            raw = torch.randint(-(2**62), 2**62, (torch.Size(shape).numel() // 4,), generator=generator)
            state[f"layers.{number}.{name}.weight"] = raw.view(torch.bfloat16).view(shape)
    writer = DirectWriter(step, threads=FILES)
    dcp.save(state, storage_writer=writer, planner=DirectSavePlanner(), no_dist=True)


class Rounds:
    def __init__(self, folder: Path, size: int, before: Path | None) -> None:
        self.folder, self.step, self.size = folder, folder / "step", size
        save(self.step, size)
        self.in_memory = is_in_memory(folder)
        self.speeds: dict[str, list[float]] = {}
        self.checkouts = {"": Path(__file__).parent.parent, **({} if before is None else {BEFORE: before})}

    def note(self, name: str, speed: float) -> None:
        self.speeds.setdefault(name, []).append(speed)

    def arms(self) -> dict[str, Callable[[], None]]:
        fio: dict[str, Callable[[], None]] = {
            READ: lambda: self.note(READ, self.ended(self.reading(), "read")),
            WRITE: lambda: self.note(WRITE, self.ended(self.writing(), "write")),
            BOTH: self.both,
        }
        return fio | {f"{when}{EXPORT}": lambda when=when: self.convert(when) for when in self.checkouts}

    def fio(self, *words: str) -> subprocess.Popen[str]:
        common = ["fio", "--output-format=json", "--group_reporting", "--thread", "--ioengine=psync"]
        how = ["--direct=0", "--bs=1M", "--fallocate=truncate"] if self.in_memory else ["--direct=1", "--bs=8M"]
        return subprocess.Popen([*common, *how, *words], stdout=subprocess.PIPE, text=True)

    def reading(self) -> subprocess.Popen[str]:
        files = sorted(self.step.glob("*.distcp"))
        jobs = [word for path in files for word in ("--name=r", f"--filename={path}", f"--size={path.stat().st_size}")]
        return self.fio("--rw=read", "--readonly", *jobs)

    def writing(self) -> subprocess.Popen[str]:
        (self.folder / "fio").mkdir()
        share = self.size // FILES // 2**23 * 2**23
        to = f"--directory={self.folder / 'fio'}", f"--numjobs={FILES}", f"--size={share}"
        return self.fio("--rw=write", "--end_fsync=1", "--name=w", *to)

    def ended(self, fio: subprocess.Popen[str], direction: str) -> float:
        """Bytes per second over all jobs."""
        printed = fio.communicate()[0]
        shutil.rmtree(self.folder / "fio", ignore_errors=direction == "read")
        if fio.returncode:
            raise SystemExit(f"error: `fio` ended with {fio.returncode}\n{printed[-500:]}")
        return float(json.loads(printed[printed.index("{") :])["jobs"][0][direction]["bw_bytes"])

    def both(self) -> None:
        read, write = self.reading(), self.writing()
        speeds = [self.ended(write, "write"), self.ended(read, "read")]
        self.note(BOTH, min(speeds))

    def convert(self, when: str) -> None:
        out, again = self.folder / "out", self.folder / "again"
        shard = self.size // FILES + 50_000_000
        self.note(f"{when}{EXPORT}", self.tunetool(when, "export", self.step, out, "--shard-size", f"{shard}B"))
        if not when:
            self.note(IMPORT, self.tunetool(when, "import", out, again))
            shutil.rmtree(again)
        shutil.rmtree(out)

    def tunetool(self, when: str, *words: object) -> float:
        argv = [sys.executable, "-m", "tunetool", "checkpoint", *map(str, words), "--json", "-"]
        environment = {**os.environ, "PYTHONPATH": str(self.checkouts[when] / "tools")}
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"error: `{' '.join(argv)}` ended with {done.returncode}\n{done.stderr}")
        told = json.loads(done.stdout)
        return float(told["bytes"] / told["seconds"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--bytes", type=parse_size, default=parse_size("2GB"))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="of tunetool, measured too")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    drawn = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="tunetool-export-", dir=asked.target) as folder:
        rounds = Rounds(Path(folder), asked.bytes, asked.before)
        arms = rounds.arms()
        for number in range(asked.rounds):
            began = time.monotonic()
            for name in drawn.sample([*arms], len(arms)):
                arms[name]()
            row = ", ".join(f"{name} {values[-1] / 1e9:.2f}" for name, values in rounds.speeds.items())
            load = os.getloadavg()[0]
            print(f"round {number + 1} ({time.monotonic() - began:.0f} s, load {load:.1f}): {row} GB/s", flush=True)
    speeds = rounds.speeds
    print(f"\nGB/s of {asked.bytes / 1e9:.1f} GB on {asked.target}, medians of {asked.rounds} rounds")
    for name, values in speeds.items():
        of = estimate(values)
        print(f"{name:16} {of.value / 1e9:6.2f} [{of.low / 1e9:.2f} to {of.high / 1e9:.2f}, {of.level:.0%}]")
    words = []
    for name in speeds:
        if not name.endswith((EXPORT, IMPORT)):
            continue
        print(figure(f"{name}, share of fio's both at once", shares(speeds, name, BOTH)))
        of_slower = shares(speeds, name, READ, WRITE)
        title = f"{name}, share of the slower of fio's read and write"
        if name == EXPORT:
            words.append(line(title, of_slower, SHARE))
        else:
            print(figure(title, of_slower))
        if name.startswith(BEFORE):
            print(figure(f"{name.removeprefix(BEFORE)}, times before", shares(speeds, name.removeprefix(BEFORE), name)))
    return status(words)


def shares(speeds: dict[str, list[float]], name: str, *others: str) -> list[float]:
    return [mine / min(rest) for mine, *rest in zip(speeds[name], *(speeds[other] for other in others), strict=True)]


if __name__ == "__main__":
    program(main)
