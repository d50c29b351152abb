"""For ``dcp.async_save``: the training loop is held only until this rank's own share has been copied."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from tunetool.errors import CannotJudge, UsageProblem

BEGIN_WITHIN = 120.0
"""Seconds in which the thread that saves must have begun."""


class Hold:
    """The training loop's wait for one save, which goes on in a thread that torch starts."""

    def __init__(self, after: Sequence[Any] = ()) -> None:
        self.began = time.monotonic()
        self.stall_seconds = 0.0
        self.after = after
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    def entered(self) -> None:
        """Told by the thread that saves, as its first act."""
        self._thread = self._thread or threading.current_thread()

    def is_mine(self) -> bool:
        """Whether the calling thread is the one that saves under this hold."""
        return self._thread is threading.current_thread()

    def release(self) -> None:
        if not self._released.is_set():
            self.stall_seconds = time.monotonic() - self.began
            self._released.set()

    def wait(self) -> None:
        """Also returns when the save's thread has ended: torch then tells why through its future."""
        while not self._released.wait(0.1):
            if self._thread is not None and not self._thread.is_alive():
                return
            if self._thread is None and time.monotonic() - self.began > BEGIN_WITHIN:
                raise CannotJudge(f"the save did not begin within {BEGIN_WITHIN:g} s", "see the future of `async_save`")

    def join(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def gpus(value: Any) -> set[torch.device]:
    """Those that hold a tensor of a state. No others are touched: that would take memory on them."""
    if isinstance(value, torch.Tensor):
        return {value.device} if value.device.type == "cuda" else set()
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return set().union(*map(gpus, parts))


def marks(devices: Iterable[torch.device]) -> list[Any]:
    """Events on the caller's current streams: what it has computed so far must be there before it is copied."""
    return [torch.cuda.current_stream(device).record_event() for device in devices]


class _Lent(dict[str, Any]):
    """The state itself, not a copy: right for a thread, which holds the loop meanwhile, and for nothing else."""

    hold: Hold

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.hold.release()
        raise UsageProblem(
            "DirectWriter's stager is for `AsyncCheckpointerType.THREAD`",
            "for a process leave `async_stager` out, or use torch's DefaultStager",
        )


class DirectStager(AsyncStager):
    """Lends the state to the save's thread, and holds the loop until that has copied what this rank writes.

    So a rank's memory holds its own share alone: what other ranks write of a replicated state, it never copies.
    """

    def __init__(self, begin: Callable[[Hold], None]) -> None:
        self._begin = begin
        self._hold: Hold | None = None

    @property
    def should_synchronize_after_execute(self) -> bool:
        return True

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._hold = Hold(marks(gpus(state_dict)))
        self._begin(self._hold)
        lent = _Lent(state_dict)
        lent.hold = self._hold
        return lent

    def synchronize_staging(self) -> None:
        if self._hold is not None:
            self._hold.wait()

    def close(self) -> None:
        """Nothing is kept here; ``release_buffers`` gives memory back."""
