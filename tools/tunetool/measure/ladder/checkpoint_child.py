"""Saves and loads a checkpoint with torch, one order at a time.

Runs under the user's own Python, so: standard library and torch, nothing of tunetool. ``measure/child_server.py`` hands
it the orders. The parent reads the drives' counters between them.
"""

from __future__ import annotations

import os
import resource
import time
from typing import Any, Callable


class Checkpoint:
    """The state, where it is saved, and the device that holds it."""

    def __init__(self, path: str) -> None:
        import torch

        self.torch: Any = torch
        self.path = path
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.state: dict[str, Any] = {}

    def make(self, count: int) -> dict[str, Any]:
        """Make a state of ``count`` bytes that nothing can compress, in 16 equal tensors."""
        torch = self.torch
        generator = torch.Generator(device=self.device).manual_seed(1)
        self.state = {
            "layer.%d" % number: torch.randint(
                0, 256, (count // 16,), dtype=torch.uint8, device=self.device, generator=generator
            )
            for number in range(16)
        }
        return {}

    def save(self) -> dict[str, Any]:
        """On the drives when this returns."""

        def act() -> None:
            with open(self.path, "wb") as stream:
                self.torch.save(self.state, stream)
                stream.flush()
                os.fsync(stream.fileno())

        return self.timed(act)

    def load(self) -> dict[str, Any]:
        """Load the file after dropping it from the page cache; compare the tensors outside the time."""
        handle = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
        loaded: dict[str, Any] = {}
        timing = self.timed(
            lambda: loaded.update(self.torch.load(self.path, map_location=self.device, weights_only=True))
        )
        equal = loaded.keys() == self.state.keys() and all(
            self.torch.equal(loaded[name], tensor) for name, tensor in self.state.items()
        )
        return dict(timing, equal=equal)

    def timed(self, act: Callable[[], None]) -> dict[str, Any]:
        """Wall clock and cores of ``act``, the GPU's work included."""
        before, began = spent(), time.monotonic()
        act()
        if self.device == "cuda":
            self.torch.cuda.synchronize()
        seconds = time.monotonic() - began
        return {"seconds": seconds, "cores": (spent() - before) / seconds, "bytes": os.path.getsize(self.path)}


def spent() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Orders:
    """Takes the orders, and keeps the checkpoint between them."""

    def __init__(self) -> None:
        self.checkpoint: Checkpoint | None = None

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "start":
            self.checkpoint = Checkpoint(order["path"])
            return {"torch": self.checkpoint.torch.__version__, "device": self.checkpoint.device}
        if self.checkpoint is None:
            raise ValueError("nothing is started")
        if order["do"] == "make":
            return self.checkpoint.make(order["bytes"])
        return {"save": self.checkpoint.save, "load": self.checkpoint.load}[order["do"]]()


answer = Orders().answer
