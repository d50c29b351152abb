"""Stands between DeepSpeed's swappers and their I/O handles: counts what they move, and changes the handles.

DeepSpeed's handle starts transfers (``async_pread``, ``async_pwrite``) and waits for all of them (``wait``). The time
in these calls is time that the step waits for storage; from the first start to the end of the wait, transfers are in
flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

READ, WRITE = "read", "write"


@dataclass
class Ledger:
    """What the handles of one rank moved in a step. Seconds are of the monotonic clock."""

    moved: dict[str, int] = field(default_factory=lambda: {READ: 0, WRITE: 0})
    """Bytes by direction."""
    waited: dict[str, float] = field(default_factory=lambda: {READ: 0.0, WRITE: 0.0})
    flights: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {READ: [], WRITE: []})
    """When transfers were in flight: from the first start to the end of the wait for them."""

    def answer(self) -> dict[str, Any]:
        """As JSON."""
        return {
            name: {"bytes": self.moved[name], "waited": self.waited[name], "flights": union(self.flights[name])}
            for name in (READ, WRITE)
        }


class CountedHandle:
    """A handle of DeepSpeed's, and what it moved. All other calls go to the handle itself."""

    def __init__(self, handle: Any, ledger: Callable[[], Ledger], clock: Callable[[], float] = time.monotonic) -> None:
        self._handle, self._ledger, self._clock = handle, ledger, clock
        self._pending: dict[str, int] = {}
        self._since: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self._pending

    def async_pread(self, buffer: Any, path: str, offset: int = 0) -> int:
        """As the handle's."""
        return self._start(READ, self._handle.async_pread, buffer, path, offset)

    def async_pwrite(self, buffer: Any, path: str, offset: int = 0) -> int:
        """As the handle's."""
        return self._start(WRITE, self._handle.async_pwrite, buffer, path, offset)

    def wait(self) -> int:
        """As the handle's. The time counts for the direction that was waited for."""
        began = self._clock()
        completed: int = self._handle.wait()
        ended = self._clock()
        ledger, whole = self._ledger(), sum(self._pending.values())
        for name, size in self._pending.items():
            # A handle of which both were asked is waited for once: each direction by its bytes.
            ledger.waited[name] += (ended - began) * size / whole
            ledger.flights[name].append((self._since[name], ended))
        self._pending, self._since = {}, {}
        return completed

    def _start(self, name: str, act: Callable[[Any, str, int], int], buffer: Any, path: str, offset: int) -> int:
        began = self._clock()
        status = act(buffer, path, offset)
        size, ledger = buffer.numel() * buffer.element_size(), self._ledger()
        ledger.waited[name] += self._clock() - began
        ledger.moved[name] += size
        self._since.setdefault(name, began)
        self._pending[name] = self._pending.get(name, 0) + size
        return status


class SwapHandles:
    """The handles of an engine's swappers, with the settings of any of several blocks.

    Swap files, buffers and processes stay the same. Each swapper has handles of its own, since it counts what its
    handle completes. Raises ``ValueError`` for a block that cannot move the files.
    """

    def __init__(self, engine: Any, blocks: Mapping[str, Mapping[str, Any]], make: Callable[..., Any]) -> None:
        parameters = next((getattr(each, "nvme_swapper", None) for each in engine.module.parameters()), None)
        optimizer = getattr(engine.optimizer, "optimizer_swapper", None)
        self.swappers = [each for each in (optimizer, parameters) if each is not None]
        self.ledger = Ledger()
        self._handles: dict[str, list[tuple[CountedHandle, CountedHandle]]] = {}
        for name, block in blocks.items():
            unit = 512 * block["intra_op_parallelism"]
            if any(each.aligned_bytes % unit for each in self.swappers):
                raise ValueError(f"the sizes of the swap files are no multiples of {unit} bytes")
            self._handles[name] = [(self._counted(make, block), self._counted(make, block)) for _ in self.swappers]

    def use(self, name: str) -> None:
        """Go on with the handles of that block. Nothing may be in flight."""
        if not all(handle.is_idle for pairs in self._handles.values() for pair in pairs for handle in pair):
            raise RuntimeError("a transfer is still in flight")
        self.ledger = Ledger()
        for swapper, (read, write) in zip(self.swappers, self._handles.get(name, ()), strict=False):
            for attribute, handle in (
                *((each, read) for each in ("read_aio_handle", "aio_read_handle")),
                *((each, write) for each in ("write_aio_handle", "aio_write_handle")),
            ):
                if hasattr(swapper, attribute):
                    setattr(swapper, attribute, handle)
            if hasattr(swapper, "gradient_swapper"):
                swapper.aio_handle = write
                swapper.gradient_swapper.aio_handle = write
                swapper.swap_buffer_manager.aio_handle = write
                for info in swapper.swap_params_info.values():
                    info.aio_handle = write

    def _counted(self, make: Callable[..., Any], block: Mapping[str, Any]) -> CountedHandle:
        shape = [block[name] for name in ("block_size", "queue_depth", "single_submit", "overlap_events")]
        return CountedHandle(make(*shape, block["intra_op_parallelism"]), lambda: self.ledger)


def union(flights: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """The same times without overlaps, the earliest first."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted((each[0], each[1]) for each in flights):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
