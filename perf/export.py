"""How near `tunetool checkpoint export` and `import` come to fio's read and write.

    .venv/bin/python perf/export.py [--target /var/tmp] [--bytes 2GB]

A step of a model's shapes is saved to the target, one file for each of four threads, exported to four files, and these
are imported. Seconds are by the command's own clock, without Python's start. fio writes and reads as many bytes in
four files, past the page cache, but on a file system in memory.
"""

from __future__ import annotations

import argparse
import shutil
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from rounds import Arm, Sample, fio_samples, program, sample, tunetool
from tunetool.checkpoint import DirectSavePlanner, DirectWriter
from tunetool.node.units import parse_size

FILES = 4
HIDDEN, INNER, ROWS = 2048, 5632, 512
LAYER = {"q": (HIDDEN, HIDDEN), "k": (ROWS, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER), "norm": (HIDDEN,)}


def save(step: Path, size: int) -> None:
    """A model of some ``size`` bytes: the tensors of layers, until there are enough."""
    generator = torch.Generator().manual_seed(1)
    state: dict[str, torch.Tensor] = {}
    while sum(tensor.nbytes for tensor in state.values()) < size:
        number = len(state) // len(LAYER)
        for name, shape in LAYER.items():
            raw = torch.randint(-(2**62), 2**62, (torch.Size(shape).numel() // 4,), generator=generator)
            state[f"layers.{number}.{name}.weight"] = raw.view(torch.bfloat16).view(shape)
    dcp.save(state, storage_writer=DirectWriter(step, threads=FILES), planner=DirectSavePlanner(), no_dist=True)


def converted(*words: object) -> float:
    """Bytes per second of a command of `checkpoint`."""
    document = tunetool("checkpoint", *words)
    return float(document["bytes"] / document["seconds"])


def prepare(asked: argparse.Namespace, folder: Path, _: ExitStack) -> dict[str, Arm]:
    warnings.simplefilter("ignore")
    size = parse_size(asked.bytes)
    save(folder / "step", size)

    def convert() -> Iterable[Sample]:
        out, again, shard = folder / "out", folder / "again", f"{size // FILES + 50_000_000}B"
        yield sample("bandwidth", converted("export", folder / "step", out, "--shard-size", shard), way="export")
        yield sample("bandwidth", converted("import", out, again), way="import")
        shutil.rmtree(out)
        shutil.rmtree(again)

    return {"convert": convert, "fio": lambda: fio_samples(folder, folder, FILES, size)}


if __name__ == "__main__":
    program(prepare, bytes="2GB")
