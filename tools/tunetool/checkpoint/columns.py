"""Write items as columns: what a rank's items have in common with those of other ranks, and arrays of numbers.

Ranks of a sharded state have the same names, dtypes and shapes, and differ in offsets. A coordinator of 1,024 ranks
with 1,344 tensors has 1.4 million items: as objects they take 10 us and 1 KB each, as columns some bytes, and what is
common is unpickled once.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Numbers = np.ndarray[Any, np.dtype[Any]]
TENSOR, SHARD, BYTES = WriteItemType.TENSOR, WriteItemType.SHARD, WriteItemType.BYTE_IO
_FIELDS: dict[type, set[str]] = {
    WriteItem: {"index", "type", "tensor_data"},
    TensorWriteData: {"chunk", "properties", "size"},
    ChunkStorageMetadata: {"offsets", "sizes"},
    TensorProperties: {"dtype", "layout", "requires_grad", "memory_format", "pin_memory"},
    MetadataIndex: {"fqn", "offset", "index"},
}
_NEWER = {"bytes_io_data"}
"""Fields that not every torch has, and that columns never hold."""
_KNOWN = all({field.name for field in dataclasses.fields(kind)} - _NEWER == names for kind, names in _FIELDS.items())
"""Whether torch's classes have the fields that this module knows; items of a version with others stay objects."""

Form = tuple[str, TensorProperties | None, torch.Size | None]
"""What many items share: the name of the type, and the properties and the shape of the whole tensor."""


def narrow(numbers: Numbers) -> Numbers:
    """The same numbers in the smallest type that holds them."""
    if not numbers.size:
        return numbers.astype("<u1")
    low, high = int(numbers.min()), int(numbers.max())
    kind = "<i8" if low < 0 or high >= 1 << 32 else "<u1" if high < 1 << 8 else "<u2" if high < 1 << 16 else "<u4"
    return numbers.astype(kind)


def sent(numbers: Numbers) -> tuple[str, bytes]:
    """Numbers for a pickle: numpy's own pickles name modules that versions of numpy have moved."""
    return numbers.dtype.str, numbers.tobytes()


def received(numbers: tuple[str, bytes]) -> Numbers:
    kind, content = numbers
    return np.frombuffer(content, kind)


def runs(starts: Numbers, lengths: Numbers) -> Numbers:
    """The indexes ``start, start + 1, ...`` of every run, one run after another."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(int(ends[-1]) if len(ends) else 0)


class Structure:
    """Names of items, and the form of each. There is one object for equal contents, as long as one is in use."""

    __slots__ = ("__weakref__", "content", "dimensions", "forms", "names", "which")

    def __init__(self, content: bytes) -> None:
        self.content = content
        names, which, forms = pickle.loads(content)  # noqa: S301  (of this process, or of another rank of this job)
        self.names: list[str] = names
        self.which = received(which)
        self.forms: list[Form] = forms
        self.dimensions = np.array([len(size or ()) for _, _, size in self.forms], np.int64)[self.which]

    def __reduce__(self) -> tuple[Any, ...]:
        return structure, (self.content,)


_structures: WeakValueDictionary[bytes, Structure] = WeakValueDictionary()


def structure(content: bytes) -> Structure:
    """The ``Structure`` of these bytes."""
    known = _structures.get(content)
    if known is None:
        known = _structures[content] = Structure(content)
    return known


def structure_of(names: list[str], which: Numbers, forms: list[Form]) -> Structure:
    """``which``: for each name, the number of its form."""
    return structure(pickle.dumps((names, sent(narrow(which)), forms), 4))


@dataclasses.dataclass(frozen=True)
class Columns:
    """``offsets`` and ``sizes``: those of the items' chunks, for each item as many as it has dimensions. ``hints``: the
    numbers of the chunks within their tensors and 1; 0 where there is none."""

    structure: Structure
    offsets: Numbers
    sizes: Numbers
    hints: Numbers

    def __reduce__(self) -> tuple[Any, ...]:
        return _columns, (self.structure, sent(self.offsets), sent(self.sizes), sent(self.hints))

    def __len__(self) -> int:
        return len(self.structure.names)

    def same_as(self, other: Columns) -> bool:
        return (
            (self.structure is other.structure or self.structure.content == other.structure.content)
            and np.array_equal(self.offsets, other.offsets)
            and np.array_equal(self.sizes, other.sizes)
            and np.array_equal(self.hints, other.hints)
        )

    def items(self) -> list[WriteItem]:
        items = []
        for index, (kind, properties, whole), at, size in self._decoded():
            item = object.__new__(WriteItem)
            # A call of the class takes five times as long.
            data = None
            if whole is not None:
                data = TensorWriteData(ChunkStorageMetadata(at, size), properties, whole)
            item.__dict__.update(index=index, type=WriteItemType[kind], tensor_data=data)
            items.append(item)
        return items

    def _decoded(self) -> Iterator[tuple[MetadataIndex, Form, torch.Size, torch.Size]]:
        forms, which = self.structure.forms, self.structure.which.tolist()
        offsets, sizes, position = self.offsets.tolist(), self.sizes.tolist(), 0
        for name, form, hint in zip(self.structure.names, which, self.hints.tolist(), strict=True):
            _, _, whole = forms[form]
            stop = position + len(whole or ())
            at, size = torch.Size(offsets[position:stop]), torch.Size(sizes[position:stop])
            position = stop
            if whole is None:
                index = MetadataIndex(name, None, hint - 1 if hint else None)
            else:
                index = object.__new__(MetadataIndex)
                index.__dict__.update(fqn=name, index=hint - 1 if hint else None, offset=at)
            yield index, forms[form], at, size


def _columns(
    common: Structure, offsets: tuple[str, bytes], sizes: tuple[str, bytes], hints: tuple[str, bytes]
) -> Columns:
    return Columns(common, received(offsets), received(sizes), received(hints))


def columns_of(items: Sequence[WriteItem]) -> Columns | None:
    """None for items with something that columns cannot say."""
    if not _KNOWN:
        return None
    names, which, hints = [], [], []
    offsets: list[int] = []
    sizes: list[int] = []
    numbers: dict[Any, int] = {}
    forms: list[Form] = []
    for item in items:
        index, data, kind = item.index, item.tensor_data, item.type
        key: Any = None
        plain = type(item) is WriteItem and type(index) is MetadataIndex and type(index.fqn) is str
        if not plain or getattr(item, "bytes_io_data", None) is not None or (data is None) is not (kind is BYTES):
            return None
        if data is None:
            plain = index.offset is None
        else:
            at, size, whole, its = data.chunk.offsets, data.chunk.sizes, data.size, data.properties
            plain = type(at) is type(size) is type(whole) is torch.Size and type(its) is TensorProperties
            plain = plain and len(at) == len(size) == len(whole) and index.offset == at
            plain = plain and (kind is SHARD or kind is TENSOR)
        if not plain:
            return None
        if data is not None:
            offsets += at
            sizes += size
            flags = its.dtype, its.layout, its.requires_grad, its.memory_format, its.pin_memory
            key = kind is SHARD, flags, whole
        form = numbers.get(key)
        if form is None:
            form = numbers[key] = len(forms)
            forms.append((kind.name, None, None) if data is None else (kind.name, data.properties, data.size))
        names.append(index.fqn)
        which.append(form)
        hints.append(0 if index.index is None else index.index + 1)
    try:
        arrays = [narrow(np.array(each, np.int64)) for each in (offsets, sizes, hints)]
    except (OverflowError, TypeError):
        return None
    return Columns(structure_of(names, np.array(which, np.int64), forms), *arrays)


class PackedTable(Mapping[str, Any]):
    """A table that never changes, and travels between ranks as bytes: where in the state each name comes from. Ranks
    with equal tables share the object."""

    __slots__ = ("__weakref__", "_content", "_table")

    def __init__(self, table: dict[str, Any] | None, content: bytes | None = None) -> None:
        self._table, self._content = table, content

    def __reduce__(self) -> tuple[Any, ...]:
        if self._content is None:
            self._content = pickle.dumps(self._table, 4)
        return _table, (self._content,)

    def table(self) -> dict[str, Any]:
        """All entries. The table must not be changed."""
        if self._table is None:
            self._table = pickle.loads(self._content or b"")  # noqa: S301  (of another rank of this job)
        return self._table or {}

    def __getitem__(self, name: str) -> Any:
        return self.table()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.table())

    def __len__(self) -> int:
        return len(self.table())


_tables: WeakValueDictionary[bytes, PackedTable] = WeakValueDictionary()


def _table(content: bytes) -> PackedTable:
    known = _tables.get(content)
    if known is None:
        known = _tables[content] = PackedTable(None, content)
    return known
