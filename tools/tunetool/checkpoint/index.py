"""Reads the two ends of many items in few requests, to find where their raw bytes are."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tunetool.checkpoint import archive
from tunetool.checkpoint.direct import pages
from tunetool.checkpoint.regions import merge
from tunetool.checkpoint.source import Files

_GAP = 16 * 1024
_READS_AT_A_TIME = 64
_LARGEST = 1024 * 1024
"""Bytes of one read, and of the largest record that describes a tensor rather than holds its data."""


@dataclass(frozen=True)
class Item:
    """The byte range of a file that holds a tensor's archive, according to the metadata."""

    tensor: str
    file: str
    offset: int
    length: int


def find(items: Sequence[Item], files: Files, threads: int) -> dict[Item, archive.Plain | None]:
    """The tensor in each item; None for an item that only ``torch.load`` can read.

    Raises ``CannotJudge`` for a file that is missing, unreadable or shorter than its items.
    """
    distinct = list(dict.fromkeys(items))
    _refuse_truncated(distinct, files)
    ends = _ends(distinct, files, threads)
    return {item: archive.find(_reader(item, ends[item.file], files), item.length) for item in distinct}


def _refuse_truncated(items: Sequence[Item], files: Files) -> None:
    sizes: dict[str, int] = {}
    for item in items:
        if item.file not in sizes:
            sizes[item.file] = files.size(item.file, item.tensor)
        if item.offset + item.length > sizes[item.file]:
            raise files.truncated(item.file, item.tensor, sizes[item.file], item.offset + item.length)


@dataclass
class _Ends:
    """What was read of one file: byte strings and their start offsets."""

    starts: list[int]
    contents: list[bytes]


def _ends(items: Sequence[Item], files: Files, threads: int) -> dict[str, _Ends]:
    wanted: dict[str, list[tuple[int, int, str]]] = {}
    for item in items:
        stop = item.offset + item.length
        wanted.setdefault(item.file, []).extend(
            (
                (item.offset, min(stop, item.offset + archive.HEAD), item.tensor),
                (max(item.offset, stop - archive.TAIL), stop, item.tensor),
            )
        )
    reads = [(file, read) for file, some in wanted.items() for read in merge(some, _LARGEST, _GAP)]
    files.expect(file for file, _ in reads)

    def carry_out(some: Sequence[tuple[str, Any]]) -> list[bytes]:
        contents: list[bytes] = []
        memory = memoryview(pages(_LARGEST))
        for file, read in some:
            view = memory[: read.stop - read.start]
            came = files.read(file, view, read.start, read.wanted[0][2])
            files.done(file)
            contents.append(bytes(view[:came]))
        return contents

    by_file: dict[str, _Ends] = {file: _Ends([], []) for file in wanted}
    # Many at a time: handing a read to a thread takes longer than the read itself.
    count = max(1, min(_READS_AT_A_TIME, -(-len(reads) // threads)))
    some = [reads[first : first + count] for first in range(0, len(reads), count)]
    with ThreadPoolExecutor(threads) as pool:
        for (file, read), content in zip(reads, itertools.chain(*pool.map(carry_out, some)), strict=True):
            by_file[file].starts.append(read.start)
            by_file[file].contents.append(content)
    return by_file


def _reader(item: Item, ends: _Ends, files: Files) -> Callable[[int, int], bytes]:
    def read(offset: int, count: int) -> bytes:
        if offset < 0 or offset + count > item.length or count > _LARGEST:
            raise ValueError
        start = item.offset + offset
        number = bisect.bisect_right(ends.starts, start) - 1
        first = start - ends.starts[number]
        content = ends.contents[number][first : first + count]
        return content if len(content) == count else files.content(item.file, start, count, item.tensor)

    return read
