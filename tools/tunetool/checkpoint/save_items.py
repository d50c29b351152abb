"""What one save writes: each item of its plan with its data."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from tunetool.checkpoint import loadable
from tunetool.checkpoint.checksums import Sums, digest_of, key_of, seal
from tunetool.checkpoint.host_buffers import Source, is_plain
from tunetool.checkpoint.items import Archive, archive
from tunetool.checkpoint.planner import DirectSavePlanner


@dataclass
class Item:
    """A write item with its data: a tensor's archive and memory, or the bytes of an object."""

    write: WriteItem
    content: Archive | bytes
    source: Source | None = None
    save: str = ""

    def tail(self, digest: str) -> bytes:
        """The bytes after the raw bytes of a tensor with a checksum; ``digest`` is the checksum."""
        assert not isinstance(self.content, bytes)  # noqa: S101  (only tensors have checksums)
        index = self.write.index
        return self.content.tail(digest + seal(digest, self.save, index.fqn, index.offset or ()))

    @property
    def length(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.length


def items_of(writes: Sequence[WriteItem], planner: SavePlanner, checksums: bool, save: str) -> list[Item]:
    """The items with their data from the planner, for the save with the token ``save``. Raises ``CannotJudge`` for a
    tensor that cannot be saved."""
    loadable.refuse_items(writes)
    if isinstance(planner, DirectSavePlanner):
        data = planner.data_of(writes)
        return [_item(write, each, checksums, save) for write, each in zip(writes, data, strict=True)]
    return [_item(write, planner.resolve_data(write), checksums, save) for write in writes]


def sums_of(items: Sequence[Item]) -> Sums:
    """The checksums of the items that have none beside their data."""
    return {key_of(item.write.index): digest_of(item.content) for item in items if isinstance(item.content, bytes)}


def _item(write: WriteItem, data: torch.Tensor | io.BytesIO, checksums: bool, save: str) -> Item:
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
    return Item(write, archive(dtype, tensor.shape, source.bytes, checksums), source, save)
