"""The layout of a rank's files: items distributed over files, and files cut into blocks that threads fill and write.

What files hold is columns, since a rank may have ten thousand tensors: each is one range between constant bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tunetool.checkpoint.columns import Numbers, runs
from tunetool.checkpoint.items import LARGE
from tunetool.checkpoint.raw_bytes import BLOCK

ZEROS = -1
"""The content of what lies between items."""


@dataclass
class Tiles:
    """What files hold, one file after another, without gaps: the length of each range and the number of its content.
    Other negative contents than ``ZEROS`` are the same bytes in every save."""

    lengths: Numbers
    contents: Numbers


@dataclass
class Block:
    """One write: ``offset`` and ``length`` in the file are multiples of 4096. ``zero_copy``: the block is the memory of
    one tensor and is written without a copy. ``number``: of all blocks."""

    number: int
    file: int
    offset: int
    length: int
    zero_copy: bool = False


@dataclass
class Runs:
    """What blocks hold, in their order: the range of its block that each fills, its content, and the first byte in it.
    ``firsts``: the first run of each block, and the number of all."""

    start: Numbers
    stop: Numbers
    content: Numbers
    skip: Numbers
    firsts: Numbers

    def of(self, chosen: Numbers) -> Numbers:
        """By block, the first of those ``chosen`` runs that are in it or later; also for the end."""
        return np.searchsorted(chosen, self.firsts)


def share_out(sizes: Sequence[int], files: int) -> list[list[int]]:
    """Distribute items, by index, over at most ``files`` files: the largest first, each to the file with the fewest
    bytes so far. Items keep their order within a file. Empty files are left out."""
    loads = [(0, file) for file in range(files)]
    shares: list[list[int]] = [[] for _ in range(files)]
    for item in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        load, file = loads[0]
        shares[file].append(item)
        heapq.heapreplace(loads, (load + max(sizes[item], 1), file))
    return [sorted(share) for share in shares if share]


def cut(tiles: Tiles, sizes: Sequence[int], limit: int, zero_copy: Iterable[int] = ()) -> tuple[list[Block], Runs]:
    """Cut files of ``sizes`` bytes, multiples of 4096, into blocks of at most ``limit`` bytes, a multiple of that too.
    The whole 4096-byte blocks of a large tile become blocks of their own if its content is one of ``zero_copy``; the
    rest joins its neighbours."""
    stops = np.cumsum(tiles.lengths)
    starts = stops - tiles.lengths
    alone = np.isin(tiles.contents, np.array([*zero_copy], np.int64))
    alone &= (tiles.lengths >= LARGE) & (starts % BLOCK == 0)
    straight = iter([*zip(starts[alone].tolist(), tiles.lengths[alone].tolist(), strict=True), (sum(sizes), 0)])
    blocks: list[Block] = []
    bounds: list[int] = []
    base, at = 0, 0
    start, length = next(straight)
    for file, size in enumerate(sizes):
        end = base + size
        while at < end:
            whole = length - length % BLOCK if at == start else 0
            stop = at + whole if whole else min(start if start > at else end, end)
            for first in range(at, stop, limit):
                blocks.append(Block(len(blocks), file, first - base, min(limit, stop - first), bool(whole)))
                bounds.append(first)
            at = stop
            if whole:
                start, length = next(straight)
        base = end
    edges = np.array([*bounds, base], np.int64)
    inside = np.searchsorted(edges, starts, "right") - 1
    counts = np.where(tiles.lengths > 0, np.searchsorted(edges, stops, "left") - inside, 0)
    which = np.repeat(np.arange(len(starts)), counts)
    block = runs(inside, counts)
    begin, end_of = np.maximum(starts[which], edges[block]), np.minimum(stops[which], edges[block + 1])
    content = tiles.contents[which]
    skip = np.where(content == ZEROS, 0, begin - starts[which])
    firsts = np.searchsorted(block, np.arange(len(blocks) + 1))
    return blocks, Runs(begin - edges[block], end_of - edges[block], content, skip, firsts)
