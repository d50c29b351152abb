"""What a rank writes in one save: each item of its plan with its data, and the layout of the files for a set of items.

A layout is kept from save to save: it holds offsets and the bytes around the tensors, and numbers instead of data, so
each save brings its own.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from tunetool.checkpoint import loadable, sums_table
from tunetool.checkpoint.checksums import Sums, digest_of, key_of
from tunetool.checkpoint.collections_off import without_collections
from tunetool.checkpoint.host_buffers import Source, is_plain, views
from tunetool.checkpoint.items import Archive, Placed, archive, place, round_up
from tunetool.checkpoint.layout import Block, Part, cut, joined, share_out
from tunetool.checkpoint.packed import Packed, PackedItems, PackedStored, Stored
from tunetool.checkpoint.planner import DirectSavePlanner


@dataclass
class Item:
    """A write item with its data: a tensor's archive and memory, or the bytes of an object."""

    write: WriteItem
    content: Archive | bytes
    source: Source | None = None

    @property
    def length(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.length


def items_of(writes: Sequence[WriteItem], planner: SavePlanner) -> list[Item]:
    """The items with their data from the planner. Raises ``CannotJudge`` for a tensor that cannot be saved."""
    loadable.refuse_items(writes)
    if isinstance(planner, DirectSavePlanner):
        data = planner.data_of(writes)
        return [_item(write, each) for write, each in zip(writes, data, strict=True)]
    return [_item(write, planner.resolve_data(write)) for write in writes]


def sums_of(items: Sequence[Item]) -> Sums:
    """The checksums of the items that have none beside their data."""
    return {key_of(item.write.index): digest_of(item.content) for item in items if isinstance(item.content, bytes)}


def _item(write: WriteItem, data: torch.Tensor | io.BytesIO) -> Item:
    if isinstance(data, io.BytesIO):
        return Item(write, data.getvalue())
    try:
        # An alias with a hold of its own on the memory, whatever becomes of the caller's tensor meanwhile.
        tensor = data.detach()
        if not is_plain(tensor):
            return Item(write, loadable.as_torch_saves(tensor))
        dtype = loadable.name_of(tensor.dtype)
    except Exception as error:  # what a tensor's own class raises
        raise loadable.refused(write.index.fqn, type(data).__name__, str(error)) from error
    source = Source(tensor)
    return Item(write, archive(dtype, tensor.shape, source.bytes), source)


_KEPT = 4
"""Number of layouts that are kept: a job may save a model and an optimizer in turns."""
_TABLE = -1


@dataclass
class Asked:
    """All that a layout depends on: at most ``files`` files, blocks of at most ``limit`` bytes, and for each item its
    archive (or the length of an object) and the bytes of each of its sources, with whether their memory is written
    without a copy. ``checksums``: whether files end with a table of them."""

    files: int
    limit: int
    items: list[Archive | int]
    sources: list[list[tuple[int, bool]]]
    checksums: bool = False


@dataclass(frozen=True)
class FileTable:
    """What the table of checksums of a file is about: the numbers of its tensors, in their order, where their raw bytes
    are, how many, and where the table is. An empty range: there is none."""

    items: Sequence[int]
    places: Sequence[int]
    lengths: Sequence[int]
    where: tuple[int, int]


@dataclass
class RankLayout:
    """``locations``: by item, the number of the file and the position in it. ``bound``: for each content that a save
    brings, the item, and which of its sources it is; or the file, and ``_TABLE``. ``tables``: of each file."""

    asked: Asked
    sizes: list[int] = field(default_factory=list)
    blocks: list[list[Block]] = field(default_factory=list)
    locations: list[tuple[int, Placed]] = field(default_factory=list)
    bound: list[tuple[int, int]] = field(default_factory=list)
    tables: list[FileTable] = field(default_factory=list)
    _stored: tuple[Sequence[WriteItem], Packed[Stored]] | None = None
    _keys: tuple[Sequence[WriteItem], list[int]] | None = None

    @property
    def buffers(self) -> int:
        """Number of host buffers that hold everything which is not written without a copy."""
        return sum(not block.zero_copy for blocks in self.blocks for block in blocks)

    def contents(
        self,
        items: Sequence[Item],
        sources: Sequence[Sequence[Source]],
        tables: Sequence[Callable[[], bytes]],
    ) -> list[Any]:
        """What these items bring, by the numbers in the layout. ``tables``: of each file, which come late."""
        contents: list[Any] = []
        for number, which in self.bound:
            if which == _TABLE:
                contents.append(tables[number])
            elif sources[number]:
                contents.append(sources[number][which])
            else:
                contents.append(items[number].content)
        return contents

    def keys(self, writes: Sequence[WriteItem]) -> list[int]:
        """The hashes of the items' names, for tables of checksums; made once for the same ``writes``."""
        known = self._keys
        if known is not None and known[0] is writes:
            return known[1]
        keys = [sums_table.key_of(write.index.fqn, write.index.offset) for write in writes]
        if isinstance(writes, Packed):
            self._keys = writes, keys
        return keys

    def stored(self, writes: Sequence[WriteItem]) -> Packed[Stored]:
        """Where each item is; the same object for the same ``writes``."""
        # Read once: another thread may save other items of the same sizes, and put these here.
        known = self._stored
        if known is not None and known[0] is writes:
            return known[1]
        stored: Packed[Stored]
        with without_collections():
            if isinstance(writes, PackedItems):
                files, placed = zip(*self.locations, strict=True) if self.locations else ((), ())
                stored = PackedStored.of(writes, files, [at.offset for at in placed], [at.length for at in placed])
            else:
                located = zip(writes, self.locations, strict=True)
                stored = Packed((write.index, file, at.offset, at.length) for write, (file, at) in located)
        if isinstance(writes, Packed):
            self._stored = writes, stored
        return stored


# Only replaced as a whole, so threads that save at the same time need no lock.
_layouts: tuple[RankLayout, ...] = ()


def forget_layouts() -> None:
    """Forget the layouts of earlier saves, and the memory that they take."""
    global _layouts  # noqa: PLW0603  (one memory for each process)
    _layouts = ()


def layout_for(asked: Asked) -> RankLayout:
    """The layout, from an earlier save that asked for the same."""
    global _layouts  # noqa: PLW0603  (one memory for each process)
    layout = next((known for known in _layouts if known.asked == asked), None) or _lay_out(asked)
    _layouts = (layout, *(each for each in _layouts if each is not layout))[:_KEPT]
    return layout


def sources_of(items: Sequence[Item], limit: int) -> list[list[Source]]:
    """The memory of each item: one range, or several where the elements must be reordered."""
    sources: list[list[Source]] = []
    for item in items:
        if item.source is None:
            sources.append([])
        elif item.source.is_flat:
            sources.append([item.source])
        else:
            sources.append([Source(view) for view in views(item.source.tensor, limit)])
    return sources


def _lay_out(asked: Asked) -> RankLayout:
    layout = RankLayout(asked, locations=[(0, Placed(0, 0, 0))] * len(asked.items))
    lengths = [item if isinstance(item, int) else item.length for item in asked.items]
    for file, share in enumerate(share_out(lengths, asked.files)):
        placed, size = place([asked.items[number] for number in share])
        parts: list[Part] = []
        zero_copy: set[int] = set()
        for number, at in zip(share, placed, strict=True):
            layout.locations[number] = file, at
            _add_parts(layout, number, at, parts, zero_copy)
        size = _add_table(layout, share, placed, size, parts)
        layout.sizes.append(size)
        layout.blocks.append(list(cut(file, list(joined(parts)), asked.limit, lambda part: part.content in zero_copy)))  # noqa: B023  (used at once)
    return layout


def _add_parts(layout: RankLayout, number: int, at: Placed, parts: list[Part], zero_copy: set[int]) -> None:
    content, bound = layout.asked.items[number], layout.bound
    if isinstance(content, int):
        parts.append(Part(at.offset, content, len(bound)))
        bound.append((number, 0))
        return
    parts.append(Part(at.offset, len(content.head), content.head))
    position = 0
    for which, (count, without_copy) in enumerate(layout.asked.sources[number]):
        if without_copy:
            zero_copy.add(len(bound))
        parts.append(Part(at.data + position, count, len(bound), number, position))
        bound.append((number, which))
        position += count
    parts.append(Part(at.data + position, content.tail_bytes, content.tail, number))


def _add_table(layout: RankLayout, share: Sequence[int], placed: Sequence[Placed], size: int, parts: list[Part]) -> int:
    """Add what follows a file's items; returns the file's size."""
    places, lengths, numbers = [], [], []
    for number, at in zip(share, placed, strict=True):
        content = layout.asked.items[number]
        if not isinstance(content, int):
            places.append(at.data)
            lengths.append(content.data_bytes)
            numbers.append(number)
    end = size
    if layout.asked.checksums and numbers:
        end = round_up(size + sums_table.bytes_of(lengths))
        parts.append(Part(size, end - size, len(layout.bound), late=True))
        layout.bound.append((len(layout.tables), _TABLE))
    layout.tables.append(FileTable(numbers, places, lengths, (size, end)))
    return end
