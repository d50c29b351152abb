"""Where a checkpoint's files hold the elements of a tensor in their order, so that bytes of a file are bytes of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from tunetool.checkpoint import index
from tunetool.checkpoint.checksums import Turns, Verified
from tunetool.checkpoint.collections_off import without_collections
from tunetool.checkpoint.contents import pieces_of
from tunetool.checkpoint.raw_bytes import ITEM_SIZES
from tunetool.checkpoint.reader import DirectReader
from tunetool.checkpoint.regions import span
from tunetool.checkpoint.source import Files


class Stretch(NamedTuple):
    """The elements of a tensor from the number ``first`` on: ``length`` bytes at ``start`` of ``file``.

    ``sums``: checks the bytes, which are to be fed from the first one on; None if the save made no checksums.
    """

    tensor: str
    first: int
    file: str
    start: int
    length: int
    sums: Verified | None


class StretchReader(DirectReader):
    """Looks for them in a step."""

    def find(self, names: Sequence[str], files: Files, turns: Turns) -> dict[str, list[Stretch]]:
        """The stretches that are all of a tensor. Those that are saved in another order, or in a way that only torch
        reads, are left out.

        Raises ``CannotJudge`` if a file is cut short, or damaged around its data.
        """
        described = self._metadata.state_dict_metadata
        with without_collections():
            items = [
                ReadItem(LoadItemType.TENSOR, at, at.offset, at, at.offset, chunk.sizes)
                for name in names
                for (at, _, _), chunk in zip(pieces_of(name, described[name]), described[name].chunks, strict=True)
                if 0 not in chunk.sizes
            ]
            stored = self._stored(items)
            ours = self._sums is not None
            plain_tensors = index.find(stored, files, self.threads, self._expected(items), ours=ours)
            found: dict[str, list[Stretch]] = {name: [] for name in names}
            for item, where in zip(items, stored, strict=True):
                name, about, plain = where.tensor, described[where.tensor], plain_tensors[where]
                dtype = str(about.properties.dtype).removeprefix("torch.")
                if plain is None or (plain.dtype, plain.shape) != (dtype, tuple(item.lengths)):
                    found.pop(name, None)
                    continue
                size = ITEM_SIZES[dtype]
                low, high = span(about.size, size, item.dest_offsets, item.lengths)
                if high - low != math.prod(item.lengths) * size or name not in found:
                    found.pop(name, None)
                    continue
                saved = self._saved_sums(item, where, plain, files)
                sums = None if saved is None else Verified(saved, turns)
                start = where.offset + plain.offset
                found[name].append(Stretch(name, low // size, where.file, start, plain.length, sums))
        return found
