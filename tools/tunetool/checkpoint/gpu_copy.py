"""Copies between GPU memory and pinned host memory by their addresses, for states of thousands of tensors.

A copy by torch makes three tensors first, and with 16 threads each of these steps waits for the interpreter's lock. The
driver's own call only queues the copy, and keeps the lock meanwhile: to get it back could take longer than the call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

_Function = Callable[[int, int, int, int], int]


@cache
def _driver() -> tuple[_Function, _Function] | None:
    """``cuMemcpyDtoHAsync`` and ``cuMemcpyHtoDAsync``; None without NVIDIA's driver."""
    try:
        library = ctypes.PyDLL("libcuda.so.1")
        found: list[Any] = [library.cuMemcpyDtoHAsync_v2, library.cuMemcpyHtoDAsync_v2]
    except (OSError, AttributeError):
        return None
    for function in found:
        function.restype = ctypes.c_int
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return found[0], found[1]


def to_host(address: int, gpu_address: int, count: int, stream: int) -> bool:
    """Start a copy of ``count`` bytes to pinned memory on the CUDA ``stream``, of the device that the thread uses.

    False if nothing was started: torch must copy then, and raises the error if there is one.
    """
    driver = _driver()
    return driver is not None and driver[0](address, gpu_address, count, stream) == 0


def to_gpu(gpu_address: int, address: int, count: int, stream: int) -> bool:
    """As ``to_host``, from pinned memory."""
    driver = _driver()
    return driver is not None and driver[1](gpu_address, address, count, stream) == 0
