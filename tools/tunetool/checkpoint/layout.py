"""The layout of a rank's files: items distributed over files, and files cut into blocks that threads fill and write."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunetool.checkpoint.items import LARGE, round_up
from tunetool.checkpoint.raw_bytes import BLOCK


@dataclass
class Part:
    """A range of a file with one kind of content: ``content`` is bytes that are the same in every save, or the number
    of a content that each save brings: an object's bytes, a tensor's memory, or a function that returns the bytes later
    (a table of checksums, once they are known; ``late``). ``item`` and ``position``: the item whose raw bytes these
    are, and the offset within them.
    """

    offset: int
    length: int
    content: Any
    item: int | None = None
    position: int = 0
    late: bool = False


@dataclass
class Piece:
    """``count`` bytes of ``part`` from its offset ``start``; they go to the offset ``at`` of their block."""

    part: Part
    start: int
    count: int
    at: int


@dataclass
class Block:
    """One write: ``offset`` and ``length`` in the file are multiples of 4096. ``zero_copy``: the block is the memory of
    one tensor and is written without a copy. ``late``: the pieces of late parts."""

    file: int
    offset: int
    pieces: list[Piece] = field(default_factory=list)
    zero_copy: bool = False
    late: list[Piece] = field(default_factory=list)

    @property
    def length(self) -> int:
        last = self.pieces[-1]
        return round_up(last.at + last.count)


def joined(parts: Iterable[Part]) -> Iterator[Part]:
    """``parts``, ordered by offset, with neighbours of constant bytes made one, zeros between them included: the end of
    a tensor's archive and the beginning of the next one."""
    last: Part | None = None
    # Tensors of equal shapes follow each other, and their constant bytes are the same.
    known: dict[bytes, bytes] = {}
    for part in parts:
        if last is not None:
            gap = part.offset - last.offset - last.length
            if type(part.content) is bytes and type(last.content) is bytes and gap < BLOCK:
                content = last.content + bytes(gap) + part.content
                content = known.setdefault(content, content)
                last = Part(last.offset, len(content), content)
                continue
            yield last
        last = part
    if last is not None:
        yield last


def share_out(sizes: Sequence[int], files: int) -> list[list[int]]:
    """Distribute items, by index, over at most ``files`` files: the largest first, each to the file with the fewest
    bytes so far. Items keep their order within a file. Empty files are left out."""
    loads = [(0, file) for file in range(files)]
    shares: list[list[int]] = [[] for _ in range(files)]
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        load, file = heapq.heappop(loads)
        shares[file].append(item)
        heapq.heappush(loads, (load + max(sizes[item], 1), file))
    return [sorted(share) for share in shares if share]


def cut(file: int, parts: Sequence[Part], limit: int, zero_copy: Callable[[Part], bool]) -> Iterator[Block]:
    """Cut ``parts``, ordered by offset, into blocks of at most ``limit`` bytes (a multiple of 4096). Where
    ``zero_copy`` returns True, the whole 4096-byte blocks of a large part become blocks of their own; the rest joins
    its neighbours."""
    block: Block | None = None
    for part in parts:
        done = 0
        if part.length >= LARGE and part.offset % BLOCK == 0 and zero_copy(part):
            if block:
                yield block
                block = None
            whole = part.length - part.length % BLOCK
            while done < whole:
                count = min(limit, whole - done)
                yield Block(file, part.offset + done, [Piece(part, done, count, 0)], zero_copy=True)
                done += count
        while done < part.length:
            at = part.offset + done
            if block and at >= block.offset + limit:
                yield block
                block = None
            if block is None:
                block = Block(file, at - at % BLOCK)
            count = min(block.offset + limit - at, part.length - done)
            piece = Piece(part, done, count, at - block.offset)
            block.pieces.append(piece)
            if part.late:
                block.late.append(piece)
            done += count
    if block:
        yield block
