"""Reads boxes of a checkpoint's tensors, whoever saved them in whichever parts, and objects as they lie in files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tunetool.checkpoint import metadata
from tunetool.checkpoint.load_targets import fills
from tunetool.checkpoint.reader import DirectReader
from tunetool.errors import CannotJudge, UsageProblem

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


class Box(NamedTuple):
    """Element ``offsets`` and ``lengths`` of a tensor, whose bytes lie together in it; or an object, without any.

    ``bytes``: of its elements; 0 for an object.
    """

    name: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    bytes: int


class BoxReader:
    """Of the checkpoint in ``path``. Checks the sums of all that is read, where the save made them.

    Raises ``UsageProblem`` if that is no checkpoint. ``described``: its metadata, where it is known.
    """

    def __init__(self, path: Path, *, threads: int | None = None, described: Metadata | None = None) -> None:
        # Objects are taken as they lie in the file: nothing is unpickled, whatever the reader would allow.
        self.path, self._reader = path, DirectReader(path, threads=threads, allow_objects=True)
        self.described: Any = described or self._reader.read_metadata()
        self._reader.set_up_storage_reader(self.described, True)
        self.entries: dict[str, Any] = self.described.state_dict_metadata
        self.overflows = 0
        """Numbers that were read so far and have become infinite in a target of a dtype that ends earlier."""
        self._whole: set[str] = set()

    def read(self, boxes: Sequence[Box], targets: Sequence[Any] | None = None) -> list[Any]:
        """The tensors of these boxes, and objects as bytes. Raises ``CannotJudge``.

        ``targets``: contiguous tensors in host memory to fill, of any dtype; new ones of the saved dtype without.
        """
        into = _Into()
        items = [item for number, box in enumerate(boxes) for item in self._items(box, number, into, targets)]
        try:
            self._reader.read_data(LoadPlan(items), into)
        except UsageProblem as error:  # the call was right: a file is not what a checkpoint has
            raise CannotJudge(error.message, error.hint) from None
        self.overflows += into.overflows
        return [into.read[number] for number in range(len(boxes))]

    def need_whole(self, name: str) -> None:
        """Raises ``CannotJudge`` unless the chunks of this tensor have each of its elements once."""
        about = self.entries[name]
        if name not in self._whole and not fills(about.size, [(chunk.offsets, chunk.sizes) for chunk in about.chunks]):
            raise CannotJudge(
                f"`{self.path / metadata.NAME}`: the chunks of `{name}` leave out elements, or have some twice",
                "the metadata is damaged: `tunetool checkpoint verify` says more",
            )
        self._whole.add(name)

    def _items(self, box: Box, number: int, into: _Into, targets: Sequence[Any] | None) -> Iterator[ReadItem]:
        about, at = self.entries[box.name], MetadataIndex(box.name, index=number)
        if not isinstance(about, TensorStorageMetadata):
            nowhere = torch.Size([0])
            yield ReadItem(LoadItemType.BYTE_IO, at, nowhere, MetadataIndex(box.name), nowhere, nowhere)
            return
        self.need_whole(box.name)
        dtype = into.dtypes[number] = about.properties.dtype
        into.read[number] = torch.empty(box.lengths, dtype=dtype) if targets is None else targets[number]
        chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))
        for item in create_read_items_for_chunk_list(box.name, about, [chunk]):
            yield replace(item, dest_index=at)


def overflows(saved: Any, converted: Any) -> int:
    """How many numbers are infinite only once they are converted."""
    if saved.dtype == converted.dtype or torch.finfo(converted.dtype).max >= torch.finfo(saved.dtype).max:
        return 0
    return int((converted.isinf() & ~saved.isinf()).sum())


class _Into:
    """Takes what a reader reads, by the number in the index of its destination; a planner, as far as it needs one."""

    def __init__(self) -> None:
        self.read: dict[int, Any] = {}
        self.dtypes: dict[int, Any] = {}
        self.overflows = 0
        self._copied: dict[int, Any] = {}
        """By the id of what is read: where it belongs."""

    def resolve_tensor(self, item: ReadItem) -> Any:
        """Where it goes to."""
        tensor, dtype = self.read[item.dest_index.index], self.dtypes[item.dest_index.index]
        for dimension, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, offset, length)
        if tensor.is_contiguous() and tensor.dtype == dtype:
            return tensor
        # In one run its sums are checked, though the read is a part of what was saved.
        read = torch.empty(item.lengths, dtype=dtype)
        self._copied[id(read)] = tensor
        return read

    def commit_tensor(self, item: ReadItem, tensor: Any) -> None:
        """Copy what was not read in place."""
        target = self._copied.pop(id(tensor), None)
        if target is None:
            return
        target.copy_(tensor)
        self.overflows += overflows(tensor, target)

    def load_bytes(self, item: ReadItem, value: Any) -> None:
        """Keep the pickle as it is."""
        self.read[item.dest_index.index] = value.getvalue()
