"""What each file of an export holds: which tensor at which byte, under which header, and the boxes of any range. Pure.

A file is its header, padded so that the tensors begin at a multiple of 4096, and the tensors: first those of a multiple
of 4096 bytes, which so begin at one, where O_DIRECT reads and writes them without a copy; then the others, those with
the largest elements first. So each begins at a multiple of its element, and a cut at any multiple of 4096 is between
two elements.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tunetool.checkpoint.raw_bytes import BLOCK, ITEM_SIZES
from tunetool.safetensors_header import DTYPES, START

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NAMES_OF = {dtype: name for name, dtype in DTYPES.items()}
"""The library's names of dtypes, by torch's."""


class Tensor(NamedTuple):
    """``saved``: its name in the step; ``dtype``: in the file, as torch names it."""

    saved: str
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


class Placed(NamedTuple):
    """A tensor that begins at the byte ``start`` of a file."""

    tensor: Tensor
    start: int


class File(NamedTuple):
    """A file of ``length`` bytes that begins with ``header``."""

    name: str
    header: bytes
    tensors: tuple[Placed, ...]
    length: int


class Part(NamedTuple):
    """A box of a tensor: elements from ``offsets`` on, ``lengths`` of them. Its bytes are together and begin at the
    byte ``start`` of the file."""

    tensor: Tensor
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        """Of its elements."""
        return math.prod(self.lengths) * ITEM_SIZES[self.tensor.dtype]


def files_of(tensors: Sequence[Tensor], shard_bytes: int) -> list[File]:
    """The files, in the tensors' order: a file takes tensors until the next one would exceed ``shard_bytes``.

    A single file is called as transformers calls it, and has no index.
    """
    shards: list[list[Tensor]] = [[]]
    held = 0
    for tensor in tensors:
        if shards[-1] and held + tensor.bytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += tensor.bytes
    if len(shards) == 1:
        return [_file(SINGLE, shards[0])]
    digits = max(5, len(str(len(shards))))
    return [
        _file(f"model-{number:0{digits}}-of-{len(shards):0{digits}}.safetensors", shard)
        for number, shard in enumerate(shards, 1)
    ]


def _file(name: str, tensors: Sequence[Tensor]) -> File:
    ordered = sorted(tensors, key=lambda tensor: (tensor.bytes % BLOCK > 0, -ITEM_SIZES[tensor.dtype]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, at = [], 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": NAMES_OF[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [at, at + tensor.bytes],
        }
        starts.append(at)
        at += tensor.bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(START + len(text)) % BLOCK)
    content = len(text).to_bytes(START, "little") + text
    placed = tuple(Placed(tensor, len(content) + start) for tensor, start in zip(ordered, starts, strict=True))
    return File(name, content, placed, len(content) + at)


def index_of(files: Sequence[File]) -> dict[str, Any]:
    """The document of ``INDEX``."""
    placed = [(placed.tensor, file.name) for file in files for placed in file.tensors]
    return {
        "metadata": {"total_size": sum(tensor.bytes for tensor, _ in placed)},
        "weight_map": {tensor.name: name for tensor, name in placed},
    }


def parts(file: File, start: int, stop: int) -> Iterator[Part]:
    """What lies in the bytes [start, stop) of a file behind its header. Both are multiples of 4096, or ``stop`` is its
    end."""
    first = bisect.bisect_right(file.tensors, start, key=lambda placed: placed.start)
    for tensor, at in itertools.takewhile(lambda placed: placed.start < stop, file.tensors[max(0, first - 1) :]):
        low, high = max(start, at), min(stop, at + tensor.bytes)
        if low >= high:
            continue
        item = ITEM_SIZES[tensor.dtype]
        for offsets, lengths in boxes(tensor.shape, (low - at) // item, (high - at) // item):
            yield Part(tensor, offsets, lengths, low)
            low += math.prod(lengths) * item


def boxes(shape: tuple[int, ...], first: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The elements [first, stop) of a tensor, in their order in memory, as offsets and lengths of boxes.

    Only the first dimension that is more than one long may be a part of the tensor's: so a box is in one run in
    memory, and what of it is in a chunk of the tensor is in one run there.
    """
    if first >= stop:
        return
    if not shape:
        yield (), ()
        return
    row, below = math.prod(shape[1:]), shape[1:]
    top, begin = divmod(first, row)
    last, end = divmod(stop, row)
    if begin or top == last:
        yield from _within(top, below, begin, end if top == last else row)
        top += 1
    if top < last:
        yield (top, *(0 for _ in below)), (last - top, *below)
    if top <= last and end:
        yield from _within(last, below, 0, end)


def _within(
    row: int, below: tuple[int, ...], first: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, lengths in boxes(below, first, stop):
        yield (row, *offsets), (1, *lengths)
