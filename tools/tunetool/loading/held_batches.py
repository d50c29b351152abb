"""How much memory the batches take that somebody still refers to, and what happens where that is too much."""

from __future__ import annotations

import gc
import time
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.node.units import format_size

_LOOK_SECONDS = 0.001


class HeldBatches:
    """The bytes of batches that are being read, wait, or are referred to: at most ``most_bytes``.

    A batch counts until nothing refers to its memory: no tensor, view, numpy array or DLPack capsule.
    """

    def __init__(self, most_bytes: int, patience: float) -> None:
        self.most_bytes, self._patience = most_bytes, patience
        self.waited_seconds = 0.0
        """For how long reading has waited, in all, because batches were held."""
        self._batches: list[tuple[StorageWeakRef, int]] = []

    def has_room(self, count: int) -> bool:
        """Whether ``count`` more bytes fit now."""
        self._batches = [each for each in self._batches if not each[0].expired()]
        return sum(size for _, size in self._batches) + count <= self.most_bytes

    def wait_for_room(self, count: int) -> None:
        """Wait until ``count`` more bytes fit. Raises ``UsageProblem`` where they never do, and ``CannotJudge`` where
        batches are held for too long."""
        if count > self.most_bytes:
            raise UsageProblem(
                f"a batch of {format_size(count)} is larger than `most_bytes` ({format_size(self.most_bytes)})",
                "take fewer samples at a time, or give `most_bytes` more",
            )
        if self.has_room(count):
            return
        began = time.monotonic()
        # Batches in a circle of references go with the next collection alone.
        gc.collect()
        while not self.has_room(count):
            if time.monotonic() - began > self._patience:
                self.waited_seconds += time.monotonic() - began
                raise self._too_many(count)
            time.sleep(_LOOK_SECONDS)
        self.waited_seconds += time.monotonic() - began

    def add(self, memory: Any) -> None:
        """Count the storage of this tensor from now on."""
        storage = memory.untyped_storage()
        self._batches.append((StorageWeakRef(storage), storage.nbytes()))

    def _too_many(self, count: int) -> CannotJudge:
        held = sum(size for _, size in self._batches)
        return CannotJudge(
            f"batches that something still refers to take {format_size(held)} ({len(self._batches)} of them), and "
            f"`most_bytes` ({format_size(self.most_bytes)}) leaves no room for {format_size(count)} more after "
            f"{self._patience:g} s",
            "let go of old batches (a view of one sample keeps its whole batch: `clone()` it), or give `most_bytes` "
            "more",
        )
