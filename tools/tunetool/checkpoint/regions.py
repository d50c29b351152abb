"""Which bytes of a saved tensor a requested part needs, and how to read them in few, large, ordered requests. Pure."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from tunetool.checkpoint.raw_bytes import BLOCK, strides

GAP = 256 * 1024
"""Largest gap in bytes that is read and discarded: reading it takes less time than a further request."""

T = TypeVar("T")


class Block(NamedTuple):
    """A box of a saved tensor (element ``offsets`` and ``lengths``) and the byte range [start, stop) that spans it."""

    start: int
    stop: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


def span(shape: Sequence[int], item_size: int, offsets: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """The byte range [start, stop) from the first to the last element of a box, which must not be empty."""
    steps = strides(shape, item_size)
    start = sum(offset * step for offset, step in zip(offsets, steps, strict=True))
    return start, start + sum((length - 1) * step for length, step in zip(lengths, steps, strict=True)) + item_size


def blocks(
    shape: Sequence[int], item_size: int, offsets: Sequence[int], lengths: Sequence[int], limit: int
) -> Iterator[Block]:
    """Cut the box into blocks that span at most ``limit`` bytes each (or one element) and skip large gaps."""
    if math.prod(lengths):
        yield from _cut(tuple(shape), item_size, tuple(offsets), tuple(lengths), limit)


def _cut(
    shape: tuple[int, ...], item_size: int, offsets: tuple[int, ...], lengths: tuple[int, ...], limit: int
) -> Iterator[Block]:
    start, stop = span(shape, item_size, offsets, lengths)
    along = next((index for index, length in enumerate(lengths) if length > 1), None)
    if along is None:
        yield Block(start, stop, offsets, lengths)
        return
    step = strides(shape, item_size)[along]
    row = stop - start - (lengths[along] - 1) * step
    # The gap between rows of an outer dimension is never smaller than the gap of an inner one.
    wide = step - row >= GAP
    if stop - start <= limit and not wide:
        yield Block(start, stop, offsets, lengths)
        return
    rows = 1 if wide or row > limit else (limit - row) // step + 1
    for first in range(0, lengths[along], rows):
        count = min(rows, lengths[along] - first)
        yield from _cut(
            shape,
            item_size,
            (*offsets[:along], offsets[along] + first, *offsets[along + 1 :]),
            (*lengths[:along], count, *lengths[along + 1 :]),
            limit,
        )


def pieces(start: int, stop: int, limit: int) -> Iterator[tuple[int, int]]:
    """Cut [start, stop) at aligned offsets into parts of at most ``limit`` bytes after widening to whole blocks."""
    while start < stop:
        end = min(stop, start - start % BLOCK + limit)
        yield start, end
        start = end


@dataclass(eq=False)
class Read(Generic[T]):
    """One read of the aligned byte range [start, stop) of a file, with the ranges needed from it: (start, stop,
    owner)."""

    start: int
    stop: int
    wanted: list[tuple[int, int, T]]


def merge(wanted: Iterable[tuple[int, int, T]], limit: int, gap: int = GAP) -> list[Read[T]]:
    """Merge the ranges (start, stop, owner) into reads of at most ``limit`` bytes, unless a single range is larger."""
    reads: list[Read[T]] = []
    for start, stop, owner in sorted(wanted, key=operator.itemgetter(0, 1)):
        low, high = start - start % BLOCK, stop + -stop % BLOCK
        last = reads[-1] if reads else None
        if last is not None and low - last.stop <= gap and max(high, last.stop) - last.start <= limit:
            last.stop = max(high, last.stop)
            last.wanted.append((start, stop, owner))
        else:
            reads.append(Read(low, high, [(start, stop, owner)]))
    return reads
