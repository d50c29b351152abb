"""How near `tunetool checkpoint export` and `import` come to fio's read and write.

    .venv/bin/python perf/export.py [--target /var/tmp] [--bytes 2GB]

A step of a model's shapes is saved to the target, one file for each of four threads, exported to four files, and these
are imported. Seconds are by the command's own clock, without Python's start. fio writes and reads as many bytes in
four files, past the page cache, but on a file system in memory.
"""

from __future__ import annotations

import shutil
import warnings
from functools import partial

import torch
import torch.distributed.checkpoint as dcp

from rounds import Arms, Call, Samples, fio_samples, program, sample, tunetool
from tunetool.checkpoint import DirectSavePlanner, DirectWriter
from tunetool.node.units import parse_size

FILES = 4
HIDDEN, INNER, ROWS = 2048, 5632, 512
LAYER = {"q": (HIDDEN, HIDDEN), "k": (ROWS, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER), "norm": (HIDDEN,)}


def layers(size: int) -> dict[str, torch.Tensor]:
    """Random tensors of as many layers as make ``size`` bytes."""
    count = -(-size // sum(2 * torch.Size(shape).numel() for shape in LAYER.values()))
    return {
        f"layers.{number}.{name}.weight": torch.randn(shape, dtype=torch.bfloat16)
        for number in range(count)
        for name, shape in LAYER.items()
    }


def prepare(call: Call) -> Arms:
    warnings.simplefilter("ignore")
    size, step, out, again = parse_size(call.asked.bytes), *(call.folder / name for name in ("step", "out", "again"))
    writer = DirectWriter(step, threads=FILES)
    dcp.save(layers(size), storage_writer=writer, planner=DirectSavePlanner(), no_dist=True)

    def convert() -> Samples:
        shard = f"{size // FILES + 50_000_000}B"
        for way, words in (("export", [step, out, "--shard-size", shard]), ("import", [out, again])):
            done = tunetool("checkpoint", way, *words)
            yield sample("bandwidth", done["bytes"] / done["seconds"], way=way)
        shutil.rmtree(out)
        shutil.rmtree(again)

    return {"convert": convert, "fio": partial(fio_samples, call.folder, call.folder, FILES, size)}


if __name__ == "__main__":
    program(prepare, bytes="2GB")
