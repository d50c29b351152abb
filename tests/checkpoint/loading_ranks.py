"""Functions of ranks that load weights, for children of ``forks.py``."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tunetool.loading import device_memory, load, load_into, sharing


def load_shared(rank: int, world: int, path: str, meet: str, piece: int, fault: str = "") -> dict[str, Any]:
    """Sums of the tensors that ``load`` and ``load_into`` gave with a process group, and the bytes that this rank read.

    ``fault``: what differs on the last rank.
    """
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    sharing.PIECE_BYTES = piece
    last: list[Any] = []
    if rank == world - 1:
        if fault == "other files":
            path = f"{path}/other.safetensors"
        elif fault in _FAULTS:
            _FAULTS[fault]()

    def progress(came: Any) -> None:
        last.append(came)
        if fault == "progress" and rank == world - 1:
            raise ValueError("no progress")

    before, failed = _open_files(), ""
    try:
        tensors = load(path, group=dist.group.WORLD, progress=progress, buffer_bytes=1 << 16)
    except Exception as error:
        failed = str(error)
    if failed:
        assert _open_files() <= before, "files stay open"
        raise RuntimeError(failed)
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        # A converted tensor cannot be shared as bytes.
        kept = torch.zeros(tensor.shape, dtype=torch.float64 if name == "t1" else tensor.dtype)
        module.register_buffer(name, kept)
    came = load_into(module, path, group=dist.group.WORLD)
    dist.destroy_process_group()
    return {
        "loaded": {name: tensor.double().sum().item() for name, tensor in tensors.items()},
        "filled": {name: tensor.double().sum().item() for name, tensor in module.named_buffers()},
        "read": last[-1].read,
        "bytes": last[-1].bytes,
        "total": last[-1].total,
        "came": came.bytes,
        "shared by": last[-1].shared_by,
    }


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _while_reading(fault: Callable[[], None]) -> None:
    really_read = os.preadv

    def read(handle: int, buffers: Any, offset: int, *flags: int) -> int:
        if offset >= 1 << 18:
            fault()
        return really_read(handle, buffers, offset, *flags)

    os.preadv = read


def _fail() -> None:
    raise OSError(5, "Input/output error")


def _have_no_memory() -> None:
    device_memory.free_memory = lambda device: 10


def _have_no_threads() -> None:
    def refused(thread: Any) -> None:
        raise RuntimeError("can't start new thread")

    threading.Thread.start = refused  # type: ignore[method-assign,assignment]


_FAULTS: dict[str, Callable[[], None]] = {
    "reading": lambda: _while_reading(_fail),
    "killed": lambda: _while_reading(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "memory": _have_no_memory,
    "threads": _have_no_threads,
}


def memory_of_loading(rank: int, world: int, path: str, threads: int, buffer_bytes: int) -> int:
    """Bytes by which a load into a module made this process larger. Its tensors are converted, so that all bytes go
    through the buffers."""
    module = torch.nn.Module()
    for name, tensor in load(path).items():
        module.register_buffer(name, tensor.to(torch.int16))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
    before = _status("VmRSS")
    load_into(module, path, threads=threads, buffer_bytes=buffer_bytes)
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024
