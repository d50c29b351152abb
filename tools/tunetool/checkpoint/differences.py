"""Compares two checkpoints, whoever saved them in whichever parts, a few of their tensors at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tunetool.checkpoint import metadata
from tunetool.checkpoint.contents import matching
from tunetool.checkpoint.reader import DirectReader, fills
from tunetool.checkpoint.regions import blocks
from tunetool.errors import CannotJudge

if TYPE_CHECKING:
    from tunetool.measure.progress import MovingProgress

AT_ONCE = 128 << 20
"""Bytes of tensors that are in memory of each checkpoint. A tensor with more is compared in slices."""
_PIECE = 1 << 20
"""Elements whose differences are computed at a time."""
State = Literal["equal", "different", "only in A", "only in B", "other shape", "other dtype", "other kind"]


@dataclass
class Compared:
    """A name in one of the checkpoints or in both. ``a`` and ``b``: dtype and shape, or `object`; None if not there."""

    name: str
    state: State
    a: str | None
    b: str | None
    elements: int = 0
    """Those of which the bytes differ."""
    largest_change: float = 0.0
    """Of the elements that are numbers in both."""
    largest_relative: float = 0.0
    """Of the same, by the larger of the two numbers."""
    nan_a: int = 0
    nan_b: int = 0


class _Box(NamedTuple):
    name: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    bytes: int


def compare(a: Path, b: Path, glob: str | None, progress: MovingProgress) -> list[Compared]:
    """Everything in ``a`` or ``b`` whose name matches ``glob``, in the order of ``a``.

    Tensors are equal if all of their bytes are; objects, if their pickles are.

    Raises ``UsageProblem`` if one is no checkpoint or no name matches, ``CannotJudge`` if one is damaged.
    """
    sides = _Side(a), _Side(b)
    names = matching([*sides[0].entries, *sides[1].entries], glob, f"`{a}` and `{b}`")
    compared = [_first_look(name, *(side.entries.get(name) for side in sides)) for name in names]
    by_name = {each.name: each for each in compared if each.state == "equal"}
    boxes = [box for name in by_name for box in _boxes(name, sides[0].entries[name])]
    total, done = sum(box.bytes for box in boxes), 0
    with progress.moving(f"compare {a} with {b}", total) as tick:
        for some in _batches(boxes):
            for box, left, right in zip(some, *(side.read(some) for side in sides), strict=True):
                _compare(by_name[box.name], left, right)
            done += sum(box.bytes for box in some)
            tick(done)
    return compared


def _first_look(name: str, a: Any, b: Any) -> Compared:
    """By the metadata alone; equal, unless these say that it is not."""
    state: State = "equal"
    if a is None or b is None:
        state = "only in A" if b is None else "only in B"
    elif type(a) is not type(b):
        state = "other kind"
    elif isinstance(a, TensorStorageMetadata) and a.size != b.size:
        state = "other shape"
    elif isinstance(a, TensorStorageMetadata) and a.properties.dtype != b.properties.dtype:
        state = "other dtype"
    return Compared(name, state, _words(a), _words(b))


def _words(about: Any) -> str | None:
    if about is None:
        return None
    if not isinstance(about, TensorStorageMetadata):
        return "object"
    return f"{str(about.properties.dtype).removeprefix('torch.')} {list(about.size)}"


def _boxes(name: str, about: Any) -> Iterator[_Box]:
    """The parts of a tensor in which it is compared, or the object."""
    if not isinstance(about, TensorStorageMetadata):
        yield _Box(name, (), (), 0)
        return
    item, nowhere = about.properties.dtype.itemsize, (0,) * len(about.size)
    for block in blocks(tuple(about.size), item, nowhere, tuple(about.size), AT_ONCE):
        yield _Box(name, block.offsets, block.lengths, math.prod(block.lengths) * item)


def _batches(boxes: Sequence[_Box]) -> Iterator[list[_Box]]:
    some: list[_Box] = []
    for box in boxes:
        if some and sum(each.bytes for each in some) + box.bytes > AT_ONCE:
            yield some
            some = []
        some.append(box)
    if some:
        yield some


class _Side:
    """One of the two checkpoints."""

    def __init__(self, path: Path) -> None:
        # Objects are compared as they lie in the file: nothing is unpickled, whatever the reader would allow.
        self.path, self._reader = path, DirectReader(path, allow_objects=True)
        described = self._reader.read_metadata()
        self._reader.set_up_storage_reader(described, True)
        self.entries: dict[str, Any] = described.state_dict_metadata

    def read(self, boxes: Sequence[_Box]) -> list[Any]:
        """The tensors of these boxes, and objects as bytes. Raises ``CannotJudge``."""
        into = _Into()
        items = [item for number, box in enumerate(boxes) for item in self._items(box, number, into)]
        self._reader.read_data(LoadPlan(items), into)
        return [into.read[number] for number in range(len(boxes))]

    def _items(self, box: _Box, number: int, into: _Into) -> Iterator[ReadItem]:
        about, at = self.entries[box.name], MetadataIndex(box.name, index=number)
        if not isinstance(about, TensorStorageMetadata):
            nowhere = torch.Size([0])
            yield ReadItem(LoadItemType.BYTE_IO, at, nowhere, MetadataIndex(box.name), nowhere, nowhere)
            return
        if not fills(about.size, [(chunk.offsets, chunk.sizes) for chunk in about.chunks]):
            raise CannotJudge(
                f"`{self.path / metadata.NAME}`: the chunks of `{box.name}` leave out elements, or have some twice",
                "the metadata is damaged: `tunetool checkpoint verify` says more",
            )
        into.read[number] = torch.empty(box.lengths, dtype=about.properties.dtype)
        chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))
        for item in create_read_items_for_chunk_list(box.name, about, [chunk]):
            yield replace(item, dest_index=at)


class _Into:
    """Takes what a reader reads, by the number in the index of its destination; a planner, as far as it needs one."""

    def __init__(self) -> None:
        self.read: dict[int, Any] = {}

    def resolve_tensor(self, item: ReadItem) -> Any:
        """Where it goes to."""
        tensor = self.read[item.dest_index.index]
        for dimension, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, offset, length)
        return tensor

    def commit_tensor(self, item: ReadItem, tensor: Any) -> None:
        """Nothing is left to do."""

    def load_bytes(self, item: ReadItem, value: Any) -> None:
        """Keep the pickle as it is."""
        self.read[item.dest_index.index] = value.getvalue()


def _compare(compared: Compared, a: Any, b: Any) -> None:
    if isinstance(a, bytes):
        compared.state = "equal" if a == b else "different"
        return
    a, b = (tensor.reshape(-1) for tensor in (a, b))
    for left, right in zip(a.split(_PIECE), b.split(_PIECE), strict=True):
        _compare_piece(compared, left, right)


def _compare_piece(compared: Compared, a: Any, b: Any) -> None:
    size = a.dtype.itemsize
    a_bytes, b_bytes = (tensor.view(torch.uint8).reshape(-1, size) for tensor in (a, b))
    is_number = a.dtype.is_floating_point or a.dtype.is_complex
    if torch.equal(a_bytes, b_bytes):
        if is_number:
            count = int(torch.isnan(_numbers(a)).sum())
            compared.nan_a += count
            compared.nan_b += count
        return
    compared.state = "different"
    compared.elements += int((a_bytes != b_bytes).any(1).sum())
    a, b = _numbers(a), _numbers(b)
    compared.nan_a += int(torch.isnan(a).sum())
    compared.nan_b += int(torch.isnan(b).sum())
    change = torch.where(a == b, 0.0, (a - b).abs())
    relative = change / torch.maximum(a.abs(), b.abs())
    both = ~(torch.isnan(a) | torch.isnan(b)) & (change > 0)
    if both.any():
        compared.largest_change = max(compared.largest_change, float(change[both].max()))
        # Infinity by infinity is no number.
        compared.largest_relative = max(compared.largest_relative, float(relative[both].nan_to_num(math.inf).max()))


def _numbers(tensor: Any) -> Any:
    """As float64, or as two of them for a complex number."""
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor.to(torch.complex128)).reshape(-1)
    return tensor.to(torch.float64)
