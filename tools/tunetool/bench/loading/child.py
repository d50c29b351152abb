"""Loads a model with one engine and checks every byte, for the benchmark; in a process that is fresh for each engine.

``answer`` takes an order and returns what goes back as JSON (see ``measure/child_server.py``): ``start`` imports torch
and sets up the device, which every engine needs; ``load`` loads once, and its seconds are from before the import of the
engine's library until every byte is on the device: the first is that of a fresh process, the next are warm.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tunetool.bench.loading.engines import LOADERS
from tunetool.bench.loading.engines.base import Place

PIECE = 32 << 20
"""Bytes of which one sum is made; less than a loader's own memory."""
_PATIENCE = timedelta(hours=1)
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def checksum(tensor: torch.Tensor) -> int:
    """A sum of all bytes that changes with any of them, and with their order."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = 0
    for start in range(0, len(data), PIECE):
        piece = data[start : start + PIECE]
        # A copy: a loader's tensors may begin at any byte.
        padded = torch.zeros(len(piece) + -len(piece) % 8, dtype=torch.uint8, device=data.device)
        padded[: len(piece)] = piece
        numbers = padded.view(torch.int64)
        weights = torch.arange(1, len(numbers) + 1, dtype=torch.int64, device=data.device) * _ODD
        part = int(((numbers ^ (numbers >> 29)) * (weights | 1)).sum())
        total = (total * 31 + part) % (1 << 64)
    return total


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Of the bytes, shapes and dtypes of all tensors, whatever their order: ``named``, of which tensor has which, and
    ``nameless``."""
    rows = {name: f"{each.dtype} {tuple(each.shape)} {checksum(each)}" for name, each in tensors.items()}
    return {"named": _sum(f"{row} {name}" for name, row in rows.items()), "nameless": _sum(rows.values())}


def _sum(rows: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(rows)).encode()).hexdigest()


def pinned_speed(device: torch.device, size: int = 1 << 30, times: int = 8) -> float:
    """Bytes per second of copies from pinned memory to the GPU: no loader can be faster."""
    source, target = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
        torch.empty(size, dtype=torch.uint8, device=device),
    )
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(times):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    return size * times / (time.perf_counter() - started)


class _Here:
    """This process: its device, and its group where several load at the same time."""

    device = torch.device("cpu")
    group: Any = None


def set_up(order: Mapping[str, Any]) -> dict[str, Any]:
    """What every job has before it loads: the device is ready, and the ranks, if there are several, know each other."""
    rank, world = order.get("rank", 0), order.get("world", 1)
    if order["device"] == "cuda":
        _Here.device = torch.device("cuda", rank)
        torch.cuda.set_device(_Here.device)
    torch.zeros(1, device=_Here.device)
    if world > 1:
        backend = "nccl" if _Here.device.type == "cuda" else "gloo"
        bound = {"device_id": _Here.device} if backend == "nccl" else {}
        dist.init_process_group(
            backend, init_method=f"file://{order['meet']}", rank=rank, world_size=world, timeout=_PATIENCE, **bound
        )
        _Here.group = dist.group.WORLD
        together()
    gpu = torch.cuda.get_device_name(_Here.device) if _Here.device.type == "cuda" else ""
    return {"device": _Here.device.type, "gpu": gpu, "torch": torch.__version__}


def together() -> None:
    """Wait for the other ranks."""
    if _Here.group is not None:
        dist.all_reduce(torch.zeros(1, device=_Here.device), group=_Here.group)
        finish(_Here.device)


def load(engine: str, directory: Path, device: torch.device, options: Mapping[str, Any]) -> dict[str, Any]:
    """Load once. The tensors are gone when this returns."""
    loader, place = LOADERS[engine].make(), Place(device, _Here.group)
    finish(device)
    together()
    before, started = fetched(), time.perf_counter()
    tensors = loader.load(directory, place, options)
    finish(device)
    seconds = time.perf_counter() - started
    answered = {
        "seconds": seconds,
        "drives": fetched() - before,
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        **digests(tensors),
    }
    # All names, before the memory behind them goes.
    tensors = {}
    gc.collect()
    loader.free()
    return answered


def fetched() -> int:
    """Bytes that the kernel fetched from drives for this process; 0 where it does not count. Read here, since whatever
    of tunetool is imported belongs to its first load."""
    try:
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(lines["read_bytes"])
    except (OSError, ValueError, KeyError):
        return 0


def finish(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def answer(order: Mapping[str, Any]) -> dict[str, Any]:
    """See the module."""
    if order["do"] == "start":
        return set_up(order)
    if order["do"] == "pinned":
        return {"speed": pinned_speed(_Here.device)}
    return load(order["engine"], Path(order["directory"]), _Here.device, order.get("options", {}))
