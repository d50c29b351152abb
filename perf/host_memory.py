"""What huge pages in a tmpfs such as /dev/shm are worth on this node, and what they cost.

    .venv/bin/python perf/host_memory.py [--size 8GiB] [--files 8]

Mounts three tmpfs with `huge=never`, `huge=within_size` and `huge=always` where only this program sees them (root, or
a user who may make namespaces); /dev/shm and the node's settings stay as they are. On each, fio writes files that have
their size, reads them, they are mapped with all pages, and registered for a GPU where there is one; `DirectWriter`
saves as many bytes in 55 tensors; 500 files of 100 bytes are written. /proc/self/smaps says how much of the mappings
lies on huge pages. What is written has been written just before, untimed: a hypervisor may take free memory back after
some seconds (free page reporting), and brings it again page by page, which is not the file system's time.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Iterable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from rounds import Arm, Sample, fio, output, program, sample
from tunetool.checkpoint import DirectSavePlanner, DirectWriter
from tunetool.node.units import parse_size

MOUNTS, APART = ("never", "within_size", "always"), "TUNETOOL_PERF_MOUNTS"
TENSORS, SMALL_FILES = 55, 500


def mapped(directory: Path) -> Iterable[tuple[str, str, float]]:
    """Seconds to map the files with all pages, the share of bytes on huge pages, seconds to register them for a GPU."""
    with ExitStack() as held:
        maps: list[mmap.mmap] = []
        began = time.perf_counter()
        for path in directory.glob("data.*"):
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED | mmap.MAP_POPULATE)
                maps.append(held.enter_context(closing(memory)))
        yield "time", "map", time.perf_counter() - began
        mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
        ours = "".join(text for text in mappings if f" {directory}/" in text.partition("\n")[0])
        huge = sum(int(count) * 1024 for count in re.findall(r"^ShmemPmdMapped:\s+(\d+)", ours, re.M))
        yield "share", "on huge pages", huge / sum(map(len, maps))
        if torch.cuda.is_available():
            yield "time", "register", sum(map(register, maps))


def register(memory: mmap.mmap) -> float:
    """Seconds to register memory for the GPU; it is taken back."""
    runtime: Any = torch.cuda.cudart()
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    began = time.perf_counter()
    status = int(runtime.cudaHostRegister(address, len(memory), 0))
    seconds = time.perf_counter() - began
    if status:
        raise RuntimeError(f"`cudaHostRegister` failed with CUDA error {status}")
    runtime.cudaHostUnregister(address)
    return seconds


def save(state: dict[str, torch.Tensor], directory: Path) -> float:
    """Bytes per second of the last of three saves. Each is written beside the one before it, which goes then, so the
    third has the memory of the first."""
    for _ in range(3):
        began = time.perf_counter()
        dcp.save(state, storage_writer=DirectWriter(directory), planner=DirectSavePlanner(), no_dist=True)
        seconds = time.perf_counter() - began
    shutil.rmtree(directory)
    return float(sum(each.nbytes for each in state.values()) / seconds)


def small_files(directory: Path) -> float:
    """Bytes of memory that they take."""
    before = os.statvfs(directory)
    (inner := directory / "small").mkdir()
    for number in range(SMALL_FILES):
        (inner / str(number)).write_bytes(b"x" * 100)
    count = (before.f_bfree - os.statvfs(directory).f_bfree) * before.f_frsize
    shutil.rmtree(inner)
    return float(count)


def prepare(asked: argparse.Namespace, folder: Path, held: ExitStack) -> dict[str, Arm]:
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    available = re.search(r"^MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    size = min(parse_size(asked.size), int(available[1]) * 1024 // 8 if available else 2**30)
    elements, device = size // TENSORS // 2, "cuda" if torch.cuda.is_available() else "cpu"
    state = {f"t{number}": torch.randn(elements, device=device).bfloat16() for number in range(TENSORS)}

    def turn(policy: str) -> Iterable[Sample]:
        here = folder / policy
        fio(here, "write", asked.files, size)
        for path in here.glob("data.*"):
            path.unlink()
        for direction in ("write", "read"):
            yield sample("bandwidth", fio(here, direction, asked.files, size), memory=policy, direction=direction)
        for figure, part, value in mapped(here):
            yield sample(figure, max(value, 1e-6), memory=policy, part=part)
        for path in here.glob("data.*"):
            path.unlink()
        yield sample("bandwidth", save(state, here / "save"), memory=policy, engine="direct")
        yield sample("memory", small_files(here), memory=policy, part="500 files of 100 bytes")

    for policy in MOUNTS:
        (folder / policy).mkdir()
        limit = f"huge={policy},size={2 * size + 2**30 + SMALL_FILES * 2**21}"
        output("mount", "-t", "tmpfs", "-o", limit, "none", folder / policy)
        held.callback(output, "umount", folder / policy)
    return {policy: partial(turn, policy) for policy in MOUNTS}


if __name__ == "__main__":
    if APART not in os.environ:
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        argv = ["unshare", *user, "--mount", "--propagation", "private", sys.executable, *sys.argv]
        os.execvpe(argv[0], argv, {**os.environ, APART: "1"})
    program(prepare, size="8GiB", files=8)
