"""The compiled code (read_loop.c), where the wheel has it, and the CUDA driver's functions that it calls."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

_VERSION = 2
_LIBRARY = Path(__file__).with_name("libread_loop.so")


def load_library(path: Path) -> Any:
    """The compiled code; None where there is none, or one of another version or for another machine."""
    try:
        library = ctypes.CDLL(str(path))
        if library.tunetool_read_loop_version() != _VERSION:
            return None
        read, copy = library.tunetool_read_loop, library.tunetool_copy_runs
    except (OSError, AttributeError):
        return None
    read.restype = copy.restype = ctypes.c_int32
    numbers = (ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
    read.argtypes = (ctypes.c_void_p, *numbers)
    copy.argtypes = (*[ctypes.c_void_p] * 4, ctypes.c_int64)
    return library


@functools.cache
def library() -> Any:
    """What this installation has, or None."""
    return load_library(_LIBRARY)


@functools.cache
def driver(*names: str) -> tuple[int, ...] | None:
    """The addresses of functions of NVIDIA's driver; None where it lacks one."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        functions = [getattr(cuda, name) for name in names]
    except (OSError, AttributeError):
        return None
    return tuple(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
