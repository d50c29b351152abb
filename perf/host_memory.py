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

import ctypes
import mmap
import os
import re
import shutil
import sys
import warnings
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from rounds import Arms, Call, Samples, fio, output, program, sample, timed
from tunetool.checkpoint import DirectSavePlanner, DirectWriter
from tunetool.node.machine.memory import bytes_left
from tunetool.node.units import parse_size

MOUNTS, APART = ("never", "within_size", "always"), "TUNETOOL_PERF_MOUNTS"
TENSORS, SMALL_FILES = 55, 500


def mapped(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED | mmap.MAP_POPULATE)


def on_huge_pages(directory: Path) -> int:
    """Bytes of this process's mappings of files there."""
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    ours = "".join(text for text in mappings if f" {directory}/" in text.partition("\n")[0])
    return sum(int(count) * 1024 for count in re.findall(r"^ShmemPmdMapped:\s+(\d+)", ours, re.M))


def register(memory: mmap.mmap) -> float:
    """Seconds to register it for the GPU; it is taken back."""
    runtime: Any = torch.cuda.cudart()
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    status, seconds, _ = timed(partial(runtime.cudaHostRegister, address, len(memory), 0))
    if int(status):
        raise RuntimeError(f"`cudaHostRegister` failed with CUDA error {int(status)}")
    runtime.cudaHostUnregister(address)
    return seconds


def save(state: dict[str, torch.Tensor], directory: Path) -> float:
    """Bytes per second of the last of three saves. Each is written beside the one before it, which goes then, so the
    third has the memory of the first."""
    for _ in range(3):
        writer, planner = DirectWriter(directory), DirectSavePlanner()
        _, seconds, _ = timed(partial(dcp.save, state, storage_writer=writer, planner=planner, no_dist=True))
    shutil.rmtree(directory)
    return float(sum(each.nbytes for each in state.values()) / seconds)


def small_files(directory: Path) -> int:
    """Bytes of memory that they take."""
    before = os.statvfs(directory)
    (inner := directory / "small").mkdir()
    for number in range(SMALL_FILES):
        (inner / str(number)).write_bytes(b"x" * 100)
    taken = before.f_bfree - os.statvfs(directory).f_bfree
    shutil.rmtree(inner)
    return taken * before.f_frsize


def prepare(call: Call) -> Arms:
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    files, size = call.asked.files, min(parse_size(call.asked.size), bytes_left() // 8)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    state = {f"t{number}": torch.randn(size // TENSORS // 2, device=device).bfloat16() for number in range(TENSORS)}

    def turn(policy: str) -> Samples:
        here, about = call.folder / policy, partial(sample, memory=policy)
        (large := here / "large").mkdir()
        fio(large, "write", files, size)
        for path in large.iterdir():
            path.unlink()
        for direction in ("write", "read"):
            yield about("bandwidth", fio(large, direction, files, size), direction=direction)
        with ExitStack() as held:
            paths = [*large.iterdir()]
            maps, seconds, _ = timed(lambda: [held.enter_context(closing(mapped(path))) for path in paths])
            yield about("time", seconds, part="map")
            yield about("share", max(on_huge_pages(large) / sum(map(len, maps)), 1e-6), part="on huge pages")
            if torch.cuda.is_available():
                yield about("time", sum(map(register, maps)), part="register")
        shutil.rmtree(large)
        yield about("bandwidth", save(state, here / "save"), engine="direct")
        yield about("memory", small_files(here), part="500 files of 100 bytes")

    for policy in MOUNTS:
        (call.folder / policy).mkdir()
        limit = f"huge={policy},size={2 * size + 2**30 + SMALL_FILES * 2**21}"
        output("mount", "-t", "tmpfs", "-o", limit, "none", call.folder / policy)
        call.held.callback(output, "umount", call.folder / policy)
    return {policy: partial(turn, policy) for policy in MOUNTS}


if __name__ == "__main__":
    if APART not in os.environ:
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        argv = ["unshare", *user, "--mount", "--propagation", "private", sys.executable, *sys.argv]
        os.execvpe(argv[0], argv, {**os.environ, APART: "1"})
    program(prepare, size="8GiB", files=8)
