"""Rows of equal length that numpy fills: the parts of a pickle that repeat for every chunk of every tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tunetool.checkpoint.columns import Numbers

Part = bytes | Numbers
"""What all rows have in common, or the bytes that each has: an array of integers, little end first."""


def integers(values: Numbers) -> list[Part]:
    """The integers, which must be 0 or more, as a pickle holds them, in the fewest bytes that all of them fit into."""
    highest = int(values.max()) if values.size else 0
    if highest < 1 << 8:
        return [b"K", values.astype("<u1")]
    if highest < 1 << 16:
        return [b"M", values.astype("<u2")]
    if highest < 1 << 31:
        return [b"J", values.astype("<i4")]
    return [b"\x8a\x08", values.astype("<i8")]


def references(numbers: Numbers) -> list[Part]:
    """Values of the pickle's memo."""
    return [b"j", numbers.astype("<u4")]


def columns(table: Numbers) -> list[Part]:
    """A tuple of integers in each row: one for each column of ``table``."""
    count = table.shape[1]
    parts = [part for column in table.T for part in integers(column)]
    return [b"(", *parts, b"t"] if count > 3 else [*parts, bytes([0x84 + count]) if count else b")"]


def filled(parts: Sequence[Part], count: int) -> Numbers:
    """``count`` rows of bytes."""
    widths = [len(part) if isinstance(part, bytes) else part.itemsize for part in parts]
    rows = np.empty((count, sum(widths)), np.uint8)
    at = 0
    for part, width in zip(parts, widths, strict=True):
        if isinstance(part, bytes):
            rows[:, at : at + width] = np.frombuffer(part, np.uint8)
        else:
            rows[:, at : at + width] = np.ascontiguousarray(part).view(np.uint8).reshape(count, width)
        at += width
    return rows


def batches(rows: Numbers, size: int, end: bytes) -> Iterator[bytes | memoryview]:
    """The rows, so many at a time, each time between a mark and the opcode ``end``. Without a copy."""
    for first in range(0, len(rows), size):
        yield b"("
        yield rows[first : first + size].reshape(-1).data
        yield end
