"""Reads ranges of files that are in memory into a GPU by compiled code (read_loop.c), where the wheel has it.

Without it, and wherever one of its steps fails, ``fetch`` reads by Python: the same bytes, or the error that names
them.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tunetool.checkpoint import compiled
from tunetool.checkpoint.host_buffers import Buffer

SLOTS = 4
"""Of a ring. One is read into while others are copied from."""
RING_BYTES = 4 << 20
"""Of the pinned memory of one thread."""
READ_BYTES = 16 << 20
"""Of one range: between two of them, a thread waits for the interpreter's lock."""


class Run(NamedTuple):
    """Bytes [start, stop) of a file, and the address of the first of them on the GPU."""

    start: int
    stop: int
    target: int


class Driver(NamedTuple):
    """Addresses of the CUDA driver's functions."""

    copy: int
    """``cuMemcpyHtoDAsync``"""
    record: int
    """``cuEventRecord``"""
    synchronize: int
    """``cuEventSynchronize``"""


class _Ring(ctypes.Structure):
    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_int64),
        ("next", ctypes.c_int64),
        ("stream", ctypes.c_void_p),
        ("events", ctypes.c_void_p * SLOTS),
        ("copy", ctypes.c_void_p),
        ("record", ctypes.c_void_p),
        ("synchronize", ctypes.c_void_p),
    )


class Ring:
    """The pinned ``memory`` of one thread, whose copies are queued on the CUDA ``stream``.

    ``events``: as many CUDA events as there are slots, each recorded on the stream before.
    """

    def __init__(self, library: Any, driver: Driver, memory: Buffer, stream: Any, events: Sequence[Any]) -> None:
        # The memory, and the events, end with what refers to them.
        self._library, self._memory, self._stream, self._events = library, memory, stream, events
        handles = (ctypes.c_void_p * SLOTS)(*(event.cuda_event for event in events))
        self._ring = _Ring(memory.address, memory.size // SLOTS, 0, stream.cuda_stream, handles, *driver)

    def read(self, handle: int, start: int, stop: int, runs: Sequence[Run]) -> bool:
        """Read the range [start, stop) of the open file and queue the copies of ``runs``, which are ordered.

        False where a step failed or the file ended before; no copy is under way then.
        """
        flat = array("q", [number for run in runs for number in run])
        address, _ = flat.buffer_info()
        if self._library.tunetool_read_loop(ctypes.byref(self._ring), handle, start, stop, address, len(runs)):
            # Those that are under way would bring older bytes than what is read again.
            self._stream.synchronize()
            return False
        return True


@functools.cache
def _parts() -> tuple[Any, Driver] | None:
    library, functions = (
        compiled.library(),
        compiled.driver("cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuEventSynchronize"),
    )
    return None if library is None or functions is None else (library, Driver(*functions))


def is_there(device: Any) -> bool:
    """Whether compiled code can read into ``device``."""
    return device.type == "cuda" and torch.version.hip is None and _parts() is not None


def ring(memory: Buffer, stream: Any) -> Ring | None:
    """The ring of a thread that queues copies on the torch ``stream``; None where compiled code cannot do it."""
    parts = _parts()
    if parts is None or not memory.pinned:
        return None
    events = [torch.cuda.Event() for _ in range(SLOTS)]
    for event in events:
        event.record(stream)
    return Ring(*parts, memory, stream, events)
