"""What are huge pages in /dev/shm worth on this node, and what do they cost?

    .venv/bin/python perf/host_memory.py [--size 8GiB] [--files 8] [--threads 16] [--rounds 6] [--no-writer]

Mounts three tmpfs with `huge=never`, `huge=within_size` and `huge=always` where only this program sees them (root, or a
user who may make namespaces); /dev/shm and the node's settings stay as they are. Every round takes each of them once,
each time another first: threads write files that have their size, the files are mapped with all pages, registered for a
GPU where there is one, read by threads, removed; `DirectWriter` saves as many bytes in 55 tensors where torch is
installed; 500 files of 100 bytes are written. /proc/self/smaps says how much of the mappings lies on huge pages.

What is timed has been done just before, untimed. A hypervisor may take free memory back after some seconds (free page
reporting), and brings it again page by page: that would be most of the time, and is not the file system's.

A line for each goal: the median over the rounds of `within_size` against `never` in the same round, its interval, the
goal, and `held`, `missed`, or `not decided` where the interval crosses the goal. What `always` takes has no goal: it is
why `within_size` is the default. Ends with 1 where something is missed, else with 3 where something is not decided or
the kernel has no huge pages for a tmpfs.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from entry import program
from goals import line, status
from tunetool.node.machine.memory import SHMEM_ENABLED, tmpfs_policies
from tunetool.node.units import format_size_binary, parse_size

MOUNTS = ("never", "within_size", "always")
BLOCK = 4 * 2**20
SMALL_FILES, SMALL_BYTES = 500, 100
TENSORS = 55


@dataclass(frozen=True)
class Goal:
    """``figure`` of ``within_size`` over that of ``never``, or the other way round where less is better."""

    figure: str
    title: str
    goal: float
    at_least: bool = True
    inverse: bool = False

    def ratios(self, rounds: Sequence[dict[str, dict[str, float]]]) -> list[float]:
        """One for each round that has the figure on both."""
        pairs = [(each["within_size"].get(self.figure), each["never"].get(self.figure)) for each in rounds]
        whole = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
        if self.inverse:
            return [theirs / max(ours, 1e-6) for ours, theirs in whole]
        return [ours / theirs for ours, theirs in whole if theirs]


GOALS = (
    Goal("write", "writing large files, within_size / never", 1.5),
    Goal("read", "reading them, within_size / never", 0.95),
    Goal("map", "seconds to map them with all pages, never / within_size", 10, inverse=True),
    Goal("register", "seconds to register them for a GPU, never / within_size", 1.5, inverse=True),
    Goal("writer", "DirectWriter, 55 tensors, within_size / never", 1.1),
    Goal("small", "memory of 500 files of 100 bytes, within_size / never", 1.05, at_least=False),
)
SHARE = 0.99
"""Of the bytes of large files, on huge pages with ``within_size``."""


class Medium:
    """One of the mounts, and what is done to it. Figures are in bytes per second, seconds and bytes."""

    def __init__(self, directory: Path, size: int, files: int, threads: int) -> None:
        self.directory, self.threads = directory, threads
        self.file_bytes = size // files // BLOCK * BLOCK
        self.paths = [directory / f"large-{number}" for number in range(files)]
        self.bytes = self.file_bytes * files

    def turn(
        self, save: Callable[[Path], float] | None, register: Callable[[int, int], float] | None
    ) -> dict[str, float]:
        """All figures, once; the mount is empty before and after."""
        self._write()
        self._remove()
        figures = {"write": self.bytes / self._write()}
        figures["map"], figures["share"], registered = self._map(register)
        figures |= {} if registered is None else {"register": registered}
        figures["read"] = self.bytes / self._in_threads(self._read_block)
        self._remove()
        if save is not None:
            figures["writer"] = save(self.directory / "save")
            shutil.rmtree(self.directory / "save")
        figures["small"] = self._small()
        return figures

    def _remove(self) -> None:
        for path in self.paths:
            path.unlink()

    def _write(self) -> float:
        self._block = memoryview(os.urandom(BLOCK))
        started = time.perf_counter()
        self.handles = []
        for path in self.paths:
            self.handles.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
            os.ftruncate(self.handles[-1], self.file_bytes)
        self._in_threads(self._write_block)
        seconds = time.perf_counter() - started
        for handle in self.handles:
            os.close(handle)
        return seconds

    def _write_block(self, file: int, at: int) -> None:
        done = 0
        while done < BLOCK:
            done += os.pwrite(self.handles[file], self._block[done:], at + done)

    def _read_block(self, file: int, at: int) -> None:
        buffer = self._buffers.setdefault(threading.get_ident(), mmap.mmap(-1, BLOCK))
        handle = self._read_handles[file]
        done = 0
        while done < BLOCK:
            done += os.preadv(handle, [memoryview(buffer)[done:]], at + done)

    def _in_threads(self, act: Callable[[int, int], None]) -> float:
        """Do it for every block of every file, the files in turn; seconds."""
        self._buffers: dict[int, mmap.mmap] = {}
        self._read_handles = [os.open(path, os.O_RDONLY) for path in self.paths]
        blocks = [(file, at) for at in range(0, self.file_bytes, BLOCK) for file in range(len(self.paths))]
        rest = iter(blocks)

        def work() -> None:
            # next() of a list's iterator is one step of the interpreter: no two threads get the same block.
            for file, at in rest:
                act(file, at)

        try:
            with ThreadPoolExecutor(self.threads) as pool:
                started = time.perf_counter()
                for future in [pool.submit(work) for _ in range(self.threads)]:
                    future.result()
                return time.perf_counter() - started
        finally:
            for handle in self._read_handles:
                os.close(handle)

    def _map(self, register: Callable[[int, int], float] | None) -> tuple[float, float, float | None]:
        """Seconds to map all files with their pages, the share of their bytes on huge pages, seconds to register."""
        maps, registered = [], 0.0
        try:
            started = time.perf_counter()
            for path in self.paths:
                handle = os.open(path, os.O_RDWR)
                maps.append(mmap.mmap(handle, self.file_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE))
                os.close(handle)
            seconds = time.perf_counter() - started
            share = huge_bytes(self.directory) / self.bytes
            if register is None:
                return seconds, share, None
            for memory in maps:
                address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                registered += register(address, self.file_bytes)
            return seconds, share, registered
        finally:
            for memory in maps:
                memory.close()

    def _small(self) -> float:
        before = taken(self.directory)
        directory = self.directory / "small"
        directory.mkdir()
        for number in range(SMALL_FILES):
            (directory / str(number)).write_bytes(b"x" * SMALL_BYTES)
        count = taken(self.directory) - before
        shutil.rmtree(directory)
        return float(count)


def taken(directory: Path) -> int:
    """Bytes of memory that the file system takes."""
    space = os.statvfs(directory)
    return (space.f_blocks - space.f_bfree) * space.f_frsize


def huge_bytes(directory: Path) -> int:
    """Bytes of mapped files under ``directory`` that this process reaches by huge pages."""
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    ours = [text for text in mappings if f" {directory}/" in text.partition("\n")[0]]
    return sum(int(count) * 1024 for text in ours for count in re.findall(r"^ShmemPmdMapped:\s+(\d+)", text, re.M))


def saver(size: int) -> Callable[[Path], float] | None:
    """Saves ``size`` bytes by DirectWriter, from the GPU where there is one; bytes per second of the last of three.

    Each save is written beside the one before it, which goes then, so the third has the memory of the first.
    """
    try:
        import torch  # noqa: PLC0415  (not everybody has it)
        import torch.distributed.checkpoint as dcp  # noqa: PLC0415  (likewise)

        from tunetool.checkpoint import DirectSavePlanner, DirectWriter  # noqa: PLC0415  (imports torch)
    except ImportError as error:
        print(f"DirectWriter: left out, {error}")
        return None
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    elements = size // TENSORS // 2
    state = {f"t{number}": torch.randn(elements, device=device).bfloat16() for number in range(TENSORS)}
    total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())

    def save(directory: Path) -> float:
        seconds = 0.0
        for _ in range(3):
            started = time.perf_counter()
            dcp.save(state, storage_writer=DirectWriter(directory), planner=DirectSavePlanner(), no_dist=True)
            seconds = time.perf_counter() - started
        return float(total / seconds)

    return save


def registrar() -> Callable[[int, int], float] | None:
    """Registers memory for the GPU and takes it back; seconds of the former. None without a GPU."""
    try:
        import torch  # noqa: PLC0415  (not everybody has it)
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    torch.zeros(1, device="cuda")
    runtime: Any = torch.cuda.cudart()

    def register(address: int, size: int) -> float:
        started = time.perf_counter()
        status = int(runtime.cudaHostRegister(address, size, 0))
        seconds = time.perf_counter() - started
        if status:
            raise SystemExit(f"error: `cudaHostRegister` of {size} bytes failed with CUDA error {status}")
        runtime.cudaHostUnregister(address)
        return seconds

    return register


def default_size() -> int:
    """8 GiB, or an eighth of the memory that is available."""
    available = re.search(r"^MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return min(8 * 2**30, int(available[1]) * 1024 // 8 if available else 2**30)


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, dict[str, float]]]:
    """The figures by round and by mount."""
    size = parse_size(options.size) if options.size else default_size()
    media = {}
    for policy in MOUNTS:
        directory = folder / policy
        directory.mkdir()
        limit = 2 * size + 2**30 + SMALL_FILES * 2**21
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"huge={policy},size={limit}", "none", directory], check=True)
        media[policy] = Medium(directory, size, options.files, options.threads)
    save, register = None if options.no_writer else saver(size), registrar()
    print(
        f"{os.uname().nodename}: Linux {os.uname().release}, {os.cpu_count()} CPUs; {options.files} files of "
        f"{format_size_binary(media['never'].file_bytes)}, {options.threads} threads"
    )
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(options.rounds):
        first = number % len(MOUNTS)
        row = {policy: media[policy].turn(save, register) for policy in MOUNTS[first:] + MOUNTS[:first]}
        rounds.append(row)
        print(
            f"round {number + 1} (load {os.getloadavg()[0]:.1f}):",
            "; ".join(shown(p, row[p]) for p in MOUNTS),
            flush=True,
        )
    return rounds


def shown(policy: str, figures: dict[str, float]) -> str:
    words = [f"write {figures['write'] / 1e9:.1f}, read {figures['read'] / 1e9:.1f} GB/s, map {figures['map']:.3f} s"]
    words += [f"register {figures['register']:.3f} s"] if "register" in figures else []
    words += [f"DirectWriter {figures['writer'] / 1e9:.1f} GB/s"] if "writer" in figures else []
    return f"{policy} " + ", ".join([*words, f"small files {figures['small'] / 1e6:.0f} MB"])


def report(rounds: Sequence[dict[str, dict[str, float]]]) -> int:
    """Print the table and the goals' lines; the exit status."""
    print(f"\nmedians of {len(rounds)} rounds")
    for policy in MOUNTS:
        figures = {name: median(each[policy][name] for each in rounds) for name in rounds[0][policy]}
        print(shown(policy, figures))
    words = [line(goal.title, goal.ratios(rounds), goal.goal, goal.at_least) for goal in GOALS if goal.ratios(rounds)]
    shares = [each["within_size"]["share"] for each in rounds]
    words.append(line("share of large files on huge pages, within_size", shares, SHARE))
    each_file = median(each["always"]["small"] for each in rounds) / SMALL_FILES
    print(f"always: {format_size_binary(round(each_file))} of memory for a file of {SMALL_BYTES} bytes")
    return status(words)


def inside_a_namespace(arguments: Sequence[str]) -> int:
    """Run this program again where its mounts are seen by nobody else, and end with it."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *user, "--mount", "--propagation", "private", sys.executable, __file__, *arguments]
    with tempfile.TemporaryDirectory(prefix="tunetool-host-memory-") as folder:
        return subprocess.run([*command, "--inside", folder], check=False).returncode


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", help="bytes of the large files together; default: 8GiB, or an eighth of free memory")
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--threads", type=int, default=min(16, 2 * len(os.sched_getaffinity(0))))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--no-writer", action="store_true", help="without DirectWriter, which needs torch")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if "within_size" not in tmpfs_policies()[0]:
        print(f"error: this kernel has no huge pages for a tmpfs: `/{SHMEM_ENABLED}`", file=sys.stderr)
        return 3
    if options.inside is None:
        return inside_a_namespace(arguments)
    return report(measure(options, options.inside))


if __name__ == "__main__":
    program(lambda: main(sys.argv[1:]))
