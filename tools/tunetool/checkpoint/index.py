"""Reads the two ends of many items in few requests, to find where their raw bytes are."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tunetool.checkpoint import archive
from tunetool.checkpoint.items import Archive
from tunetool.checkpoint.items import archive as archive_of
from tunetool.checkpoint.raw_bytes import Plain, pages
from tunetool.checkpoint.regions import merge
from tunetool.checkpoint.source import Files
from tunetool.ctrl_c import Threads
from tunetool.errors import CannotJudge

_GAP = 16 * 1024
_NEAR = 2048
"""Gaps in bytes that are read and discarded: less work than a further read, from drives and from memory."""
_READS_AT_A_TIME = 64
_LARGEST = 1024 * 1024
"""Bytes of one read, and of the largest record that describes a tensor rather than holds its data."""


class Item(NamedTuple):
    """The byte range of a file that holds a tensor's archive, according to the metadata."""

    tensor: str
    file: str
    offset: int
    length: int


def find(
    items: Sequence[Item], files: Files, threads: int, expected: Sequence[Archive | None] = (), *, ours: bool = False
) -> dict[Item, Plain | None]:
    """The tensor in each item; None for an item that only ``torch.load`` can read.

    ``expected``: by item, the archive that it probably is. Comparing its bytes takes less time than parsing them.

    Raises ``CannotJudge`` for a file that is missing, unreadable or shorter than its items; with ``ours``, also for a
    tensor whose archive is not the one that ``DirectWriter`` writes for it.
    """
    distinct = {
        item: probably if probably is not None and probably.length == item.length else None
        for item, probably in itertools.zip_longest(items, expected)
    }
    _refuse_truncated([*distinct], files)
    ends = _ends(distinct, files, threads)
    found: dict[Item, Plain | None] = {}
    for item, probably in distinct.items():
        of_file = ends[item.file]
        if probably is not None and of_file.holds(item.offset, probably):
            found[item] = probably.plain
            continue
        read = _reader(item, of_file, files)
        plain = _compared(probably, read) if probably is not None else None
        if plain is None:
            plain = archive.find(read, item.length)
            if ours and plain is not None and not _is_ours(plain, item, read):
                raise CannotJudge(
                    f"`{files.directory / item.file}`: `{item.tensor}` is damaged: what is around its data is not what "
                    "was saved",
                    "load another checkpoint, and look at the health of the drives: `tunetool verify`",
                )
        found[item] = plain
    return found


def _is_ours(plain: Plain, item: Item, read: Callable[[int, int], bytes]) -> bool:
    expected = archive_of(plain.dtype, plain.shape, plain.length)
    return expected.length == item.length and _compared(expected, read) == plain


def _compared(expected: Archive, read: Callable[[int, int], bytes]) -> Plain | None:
    """The tensor in an item of the length of ``expected``, if all bytes around its data are the same; else None."""
    if read(0, len(expected.head)) != expected.head:
        return None
    if read(expected.length - expected.tail_bytes, expected.tail_bytes) != expected.tail:
        return None
    return expected.plain


def _refuse_truncated(items: Sequence[Item], files: Files) -> None:
    sizes: dict[str, int] = {}
    for tensor, file, offset, length in items:
        if file not in sizes:
            sizes[file] = files.size(file, tensor)
        if offset + length > sizes[file]:
            raise files.truncated(file, tensor, sizes[file], offset + length)


@dataclass
class _Ends:
    """What was read of one file: byte strings and their start offsets."""

    starts: list[int]
    contents: list[bytes]

    def holds(self, start: int, expected: Archive) -> bool:
        """Whether all bytes around the data of an archive at ``start`` are here, each in one string."""
        return self._has(start, expected.head) and self._has(
            start + expected.length - expected.tail_bytes, expected.tail
        )

    def _has(self, start: int, expected: bytes) -> bool:
        number = bisect.bisect_right(self.starts, start) - 1
        return self.contents[number].startswith(expected, start - self.starts[number])


def _ends(items: Mapping[Item, Archive | None], files: Files, threads: int) -> dict[str, _Ends]:
    wanted: dict[str, list[tuple[int, int, str]]] = {}
    for item, expected in items.items():
        stop = item.offset + item.length
        head, tail = (len(expected.head), expected.tail_bytes) if expected else (archive.HEAD, archive.TAIL)
        of_file = wanted.setdefault(item.file, [])
        of_file.append((item.offset, min(stop, item.offset + head), item.tensor))
        of_file.append((max(item.offset, stop - tail), stop, item.tensor))
    if files.in_memory:
        return {file: _from_memory(file, sorted(some), files) for file, some in wanted.items()}
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
    with Threads(threads) as pool:
        contents = itertools.chain.from_iterable(pool.each(carry_out, some))
        for (file, read), content in zip(reads, contents, strict=True):
            by_file[file].starts.append(read.start)
            by_file[file].contents.append(content)
    return by_file


def _from_memory(file: str, wanted: Sequence[tuple[int, int, str]], files: Files) -> _Ends:
    """The ordered ranges, neighbours in one read, by this thread: threads would only wait for each other."""
    ranges: list[tuple[int, int]] = []
    for start, stop, _ in wanted:
        if ranges and start - ranges[-1][1] <= _NEAR and stop - ranges[-1][0] <= _LARGEST:
            ranges[-1] = ranges[-1][0], max(stop, ranges[-1][1])
        else:
            ranges.append((start, stop))
    return _Ends([start for start, _ in ranges], files.from_memory(file, ranges, wanted[0][2]))


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
