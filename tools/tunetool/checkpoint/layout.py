"""What goes where in a rank's files: items shared out over files, files cut into blocks that threads fill and write."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tunetool.checkpoint.items import BLOCK, LARGE, round_up


class Bytes(Protocol):
    """Anything of a known length; see ``staging.Source``."""

    @property
    def bytes(self) -> int: ...


@dataclass
class Part:
    """Bytes of one kind at a place in a file: ``content`` is known bytes, a function that gives them later (a tail,
    once the checksum is known), or a tensor's memory. ``item`` and ``position``: of which item's raw bytes, from where.
    """

    offset: int
    length: int
    content: Any
    item: int | None = None
    position: int = 0


@dataclass
class Piece:
    """``count`` bytes of ``part`` from ``start``, which lie at ``at`` in their block."""

    part: Part
    start: int
    count: int
    at: int


@dataclass
class Block:
    """What one write takes: ``offset`` and ``length`` in the file, whole blocks of 4096. ``straight``: it is the memory
    of one tensor, written without a copy."""

    file: int
    offset: int
    pieces: list[Piece] = field(default_factory=list)
    straight: bool = False

    @property
    def length(self) -> int:
        last = self.pieces[-1]
        return round_up(last.at + last.count)


def share_out(sizes: Sequence[int], files: int) -> list[list[int]]:
    """Items by number for each of ``files`` files: the largest first, each to the file with the fewest bytes. Within a
    file they keep their order. Files that would stay empty are left out."""
    loads = [(0, file) for file in range(files)]
    shares: list[list[int]] = [[] for _ in range(files)]
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        load, file = heapq.heappop(loads)
        shares[file].append(item)
        heapq.heappush(loads, (load + max(sizes[item], 1), file))
    return [sorted(share) for share in shares if share]


def cut(file: int, parts: Sequence[Part], limit: int, straight: Callable[[Part], bool]) -> Iterator[Block]:
    """``parts``, in the order of their offsets, as blocks of at most ``limit`` bytes (a multiple of 4096). Where
    ``straight`` says so, a large part's whole blocks are blocks of their own, and what is left joins its neighbours."""
    block: Block | None = None
    for part in parts:
        done = 0
        if part.length >= LARGE and part.offset % BLOCK == 0 and straight(part):
            if block:
                yield block
                block = None
            whole = part.length - part.length % BLOCK
            while done < whole:
                count = min(limit, whole - done)
                yield Block(file, part.offset + done, [Piece(part, done, count, 0)], straight=True)
                done += count
        while done < part.length:
            at = part.offset + done
            if block and at >= block.offset + limit:
                yield block
                block = None
            if block is None:
                block = Block(file, at - at % BLOCK)
            count = min(block.offset + limit - at, part.length - done)
            block.pieces.append(Piece(part, done, count, at - block.offset))
            done += count
    if block:
        yield block
