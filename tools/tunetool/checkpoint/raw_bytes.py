"""The raw bytes of a tensor in a file and in memory: sizes, strides, pages. Small, since every load imports it.

Pure: no torch here; dtypes go by torch's names (``bfloat16``).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import NamedTuple

BLOCK = 4096
"""Block size in bytes: offsets and lengths of O_DIRECT must be multiples of it. Enough for drives with 4 KiB
sectors."""

ITEM_SIZES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes per element by dtype, as torch names it."""


class Plain(NamedTuple):
    """A contiguous tensor: ``length`` raw bytes at ``offset`` from the start of its item; ``dtype`` by torch's name."""

    offset: int
    length: int
    dtype: str
    shape: tuple[int, ...]


def strides(shape: Sequence[int], item_size: int = 1) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as torch computes them (a dimension of 0 counts as 1): in elements, or in bytes
    with the size of one."""
    steps, step = [], item_size
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


def pages(count: int) -> mmap.mmap:
    """Page-aligned, zeroed, private memory of ``count`` bytes."""
    return mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def memory_at(address: int, count: int) -> memoryview:
    """A view of ``count`` bytes of memory at ``address``, not copied. The caller must keep that memory alive."""
    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")
