"""Writes `.metadata` opcode by opcode: a pickle that `pickle.load` and ``metadata.loads`` read as torch's own classes.

Python's pickler takes 10 us for an item, and would have to begin anew for every save. Here the part of each rank is a
byte string of its own: all that parts refer to, which is classes, names of tensors and names of files, is put into the
pickle's memo first, at known numbers. So the parts of an earlier save are used again while only the names of files
change. A pickle cannot hold values that belong to nothing: they are tuples that stand for the version until the version
itself, which comes later, replaces them.

Where tables and results are columns, rows of equal length are filled by numpy, for all ranks at once.

What is written here needs no check by ``metadata.loads``: every value has the exact type that it accepts. For anything
else, ``Unusual`` is raised, and the caller lets Python's pickler write it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tunetool.checkpoint.checksums import Sums
from tunetool.checkpoint.columns import Columns, Numbers
from tunetool.checkpoint.holders import HOLDERS
from tunetool.checkpoint.metadata_opcodes import (
    BATCH,
    BEGIN,
    BYTES,
    CHUNK,
    CHUNK_SIZES,
    CONTIGUOUS,
    INDEX,
    INDEX_HINT,
    INDEX_OFFSET,
    INFO,
    INFO_LENGTH,
    INFO_OFFSET,
    NAMES,
    NEW,
    PROPERTIES,
    PUT,
    SIZE,
    STRIDED,
    TENSOR,
    TRUTH,
    Unusual,
    get,
    integer,
    remembered,
    text_of,
    tuple_of,
)
from tunetool.checkpoint.packed import Packed, PackedStored, Results, Stored
from tunetool.checkpoint.tensor_table import TensorTable

Part = bytes | Numbers
"""What all rows have in common, or the bytes that each has: an array of integers, little end first."""


def integers(values: Numbers) -> list[Part]:
    """The integers, which must be 0 or more, as a pickle holds them, in the fewest bytes that all of them fit into."""
    highest = int(values.max()) if values.size else 0
    if highest < 1 << 8:
        return [b"K", values.astype("<u1")]
    if highest < 1 << 16:
        return [b"M", values.astype("<u2")]
    if highest < 1 << 31:
        return [b"J", values.astype("<i4")]
    return [b"\x8a\x08", values.astype("<i8")]


def references(numbers: Numbers) -> list[Part]:
    """Values of the pickle's memo."""
    return [b"j", numbers.astype("<u4")]


def columns(table: Numbers) -> list[Part]:
    """A tuple of integers in each row: one for each column of ``table``."""
    count = table.shape[1]
    parts = [part for column in table.T for part in integers(column)]
    return [b"(", *parts, b"t"] if count > 3 else [*parts, bytes([0x84 + count]) if count else b")"]


def filled(parts: Sequence[Part], count: int) -> Numbers:
    """``count`` rows of bytes."""
    widths = [len(part) if isinstance(part, bytes) else part.itemsize for part in parts]
    rows = np.empty((count, sum(widths)), np.uint8)
    at = 0
    for part, width in zip(parts, widths, strict=True):
        if isinstance(part, bytes):
            rows[:, at : at + width] = np.frombuffer(part, np.uint8)
        else:
            rows[:, at : at + width] = np.ascontiguousarray(part).view(np.uint8).reshape(count, width)
        at += width
    return rows


def batches(rows: Numbers, size: int, end: bytes) -> Iterator[bytes | memoryview]:
    """The rows, so many at a time, each time between a mark and the opcode ``end``. Without a copy."""
    for first in range(0, len(rows), size):
        yield b"("
        yield rows[first : first + size].reshape(-1).data
        yield end


Content = list[bytes | memoryview]
"""Bytes in parts."""

SUMS = "tunetool_sums"
"""An attribute of the metadata, which torch ignores: the checksums (xxh3_64) of what has none beside its data, which is
objects and tensors that ``torch.save`` wrote. It is there where the save made checksums."""


class _Sizes(dict[Any, bytes]):
    """The bytes of each shape: shapes repeat."""

    def __missing__(self, size: Any) -> bytes:
        if type(size) is not torch.Size:
            raise Unusual
        made = self[size] = SIZE + tuple_of([integer(length) for length in size]) + b"\x85R"
        return made


def _batches(entries: Sequence[bytes], end: bytes) -> bytes:
    return b"".join(b"(" + b"".join(entries[first : first + BATCH]) + end for first in range(0, len(entries), BATCH))


def _properties(properties: Any) -> bytes:
    if type(properties) is not TensorProperties:
        raise Unusual
    its = properties
    return _state_of(its.dtype, its.layout, its.requires_grad, its.memory_format, its.pin_memory)


@lru_cache(256, typed=True)
def _state_of(dtype: Any, layout: Any, requires_grad: Any, memory_format: Any, pin_memory: Any) -> bytes:
    if (
        layout is not torch.strided
        or memory_format is not torch.contiguous_format
        or type(requires_grad) is not bool
        or type(pin_memory) is not bool
    ):
        raise Unusual
    name = str(dtype).removeprefix("torch.")
    if type(dtype) is not torch.dtype or getattr(torch, name, None) is not dtype:
        raise Unusual
    dtype_name = text_of("torch") + text_of(name) + b"\x93"
    return PROPERTIES + dtype_name + STRIDED + TRUTH[requires_grad] + CONTIGUOUS + TRUTH[pin_memory] + b"tb"


class Described:
    """The tables of tensors and of the planner, as bytes; ``names`` refers to the name of each tensor.

    Raises ``Unusual``.
    """

    def __init__(self, tensors: Any, planner_data: Any) -> None:
        if isinstance(tensors, TensorTable) and not tensors.is_as_planned:
            tensors = dict(tensors)
        if not isinstance(tensors, (dict, TensorTable)) or not set(map(type, tensors)) <= {str}:
            raise Unusual
        first = len(NAMES)
        self.names = {name: get(number) for number, name in enumerate(tensors, first)}
        self.next_number = first + len(tensors)
        self.definitions = remembered([text_of(name) + PUT for name in tensors])
        self._sizes = _Sizes()
        entries = list(self._of_columns(tensors)) if isinstance(tensors, TensorTable) else self._of_objects(tensors)
        self.tensors = b"}" + _batches(entries, b"u")
        self.planner = self._planner(planner_data)
        self._stored: dict[int, tuple[Packed[Stored], int, bytes]] = {}

    def _of_objects(self, tensors: dict[str, Any]) -> list[bytes]:
        """As ``_described`` for every tensor. Those that torch plans alike share what their one chunk is."""
        entries = []
        known: dict[tuple[int, int, int], bytes] = {}
        for reference, each in zip(self.names.values(), tensors.values(), strict=True):
            if type(each) is not TensorStorageMetadata or type(each.chunks) is not list or len(each.chunks) != 1:
                entries.append(reference + self._described(each))
                continue
            key = id(each.properties), id(each.size), id(each.chunks[0])
            if key not in known:
                known[key] = self._described(each)
            entries.append(reference + known[key])
        return entries

    def _described(self, each: Any) -> bytes:
        if type(each) is BytesStorageMetadata:
            return BYTES
        if type(each) is not TensorStorageMetadata or type(each.chunks) is not list:
            raise Unusual
        sizes, chunks = self._sizes, []
        for chunk in each.chunks:
            if type(chunk) is not ChunkStorageMetadata or not len(chunk.offsets) == len(chunk.sizes) == len(each.size):
                raise Unusual
            chunks.append(CHUNK + sizes[chunk.offsets] + CHUNK_SIZES + sizes[chunk.sizes] + b"ub")
        head = TENSOR + _properties(each.properties) + NAMES["size"] + sizes[each.size] + NAMES["chunks"]
        return head + b"]" + _batches(chunks, b"e") + b"ub"

    def _of_columns(self, table: TensorTable) -> Iterable[bytes]:
        """As ``_described`` for every tensor, in the order of the table. Chunks with the same number of dimensions are
        rows of the same length."""
        chunks: dict[int, Iterator[Numbers]] = {}
        dimensions = np.array([len(size or ()) for _, size in table.described], np.int64)
        of_chunk = np.repeat(dimensions, table.counts)
        for count in set(dimensions.tolist()):
            inside = np.repeat(of_chunk == count, of_chunk)
            bounds = [part[inside].reshape(-1, count) for part in (table.offsets, table.sizes)] if count else []
            number = int((of_chunk == count).sum())
            offsets, sizes = bounds or [np.zeros((number, 0), np.uint8)] * 2
            if offsets.min(initial=0) < 0 or sizes.min(initial=0) < 0:
                raise Unusual
            size = SIZE, b"\x85R"
            parts = [
                CHUNK,
                size[0],
                *columns(offsets),
                size[1],
                CHUNK_SIZES,
                size[0],
                *columns(sizes),
                size[1],
                b"ub",
            ]
            same = dimensions == count
            chunks[count] = iter(np.split(filled(parts, number), np.cumsum(table.counts[same])[:-1]))
        for reference, (properties, whole) in zip(self.names.values(), table.described, strict=True):
            rows = next(chunks[len(whole or ())])
            if properties is None or whole is None:
                yield reference + BYTES
                continue
            head = TENSOR + _properties(properties) + NAMES["size"] + self._sizes[whole] + NAMES["chunks"] + b"]"
            yield b"".join((reference, head, *batches(rows, BATCH, b"e"), b"ub"))

    def _planner(self, data: Any) -> bytes:
        if data is None:
            return b"N"
        if type(data) is not dict:
            raise Unusual
        outer: dict[Any, bytes] = {}
        entries = []
        for name, path in data.items():
            if type(path) is not tuple:
                raise Unusual
            # Most names lie in the same few tables.
            around = path[:-1] if set(map(type, path)) == {str} else None
            if around is None:
                entries.append(self._string(name) + tuple_of([self._part(part) for part in path]))
                continue
            if around not in outer:
                outer[around] = b"".join(map(self._string, around))
            parts = outer[around] + self._string(path[-1])
            end = b"%c" % (0x84 + len(path)) if len(path) <= 3 else b"t"
            entries.append(b"%b%b%b%b" % (self._string(name), b"(" if len(path) > 3 else b"", parts, end))
        return b"}" + _batches(entries, b"u")

    def _part(self, part: Any) -> bytes:
        return integer(part) if type(part) is int else self._string(part)

    def _string(self, value: Any) -> bytes:
        if type(value) is not str:
            raise Unusual
        return self.names.get(value) or text_of(value)

    def rows(self, results: Sequence[Results]) -> Content | None:
        """The table of files of all ranks. None if it is not all columns, or not what the tables describe."""
        ranks = [_columns_of(result) for result in results]
        if None in ranks or not ranks:
            return None
        every = [each for each in ranks if each is not None]
        numbers = {name: number for number, name in enumerate(self.names, len(NAMES))}
        memo: dict[int, Numbers] = {}
        plain: dict[int, Numbers] = {}
        for items, _ in every:
            its = items.structure
            if id(its) not in memo:
                memo[id(its)] = np.array([numbers.get(name, -1) for name in its.names], np.int64)
                plain[id(its)] = np.array([whole is None for _, _, whole in its.forms], bool)[its.which]
        name = np.concatenate([memo[id(items.structure)] for items, _ in every])
        whole = np.concatenate([plain[id(items.structure)] for items, _ in every])
        dimensions = np.concatenate([items.structure.dimensions for items, _ in every])
        bounds = np.concatenate([items.offsets for items, _ in every])
        hints = np.concatenate([items.hints for items, _ in every]).astype(np.int64)
        files = [len(result.names) for result in results]
        firsts = (self.next_number + np.cumsum(files) - files).tolist()
        file = np.concatenate([where[0].astype(np.int64) + at for (_, where), at in zip(every, firsts, strict=True)])
        offset, length = (np.concatenate([where[which] for _, where in every]) for which in (1, 2))
        # An object has no offset and no number, and a tensor has both.
        if any((part < 0).any() for part in (name, bounds, offset, length)) or ((hints == 0) != whole).any():
            return None
        content: Content = [b"}"]
        for count in [-1, *set(dimensions[~whole].tolist())]:
            of = whole if count < 0 else (dimensions == count) & ~whole
            table = bounds[np.repeat(of, dimensions)].reshape(int(of.sum()), max(0, count))
            hint = [b"N"] if count < 0 else integers(hints[of] - 1)
            at = [b"N"] if count < 0 else [SIZE, *columns(table), b"\x85R"]
            parts = [
                INDEX,
                *references(name[of]),
                INDEX_HINT,
                *hint,
                INDEX_OFFSET,
                *at,
                INFO,
                *references(file[of]),
            ]
            parts += [INFO_OFFSET, *integers(offset[of]), INFO_LENGTH, *integers(length[of]), b"ub"]
            content += batches(filled(parts, int(of.sum())), BATCH, b"u")
        return content

    def stored(self, rank: int, stored: Packed[Stored], first_file: int) -> bytes:
        """The entries of a rank in the table of files, whose names begin at ``first_file`` in the memo. Made once
        while a rank's entries stay the same."""
        known = self._stored.get(rank)
        if known is not None and known[1] == first_file and known[0].same_as(stored):
            return known[2]
        made = self._entries(stored, first_file)
        stored.forget_parts()
        self._stored[rank] = stored, first_file, made
        return made

    def _entries(self, stored: Iterable[Stored], first_file: int) -> bytes:
        names, sizes, entries = self.names, self._sizes, []
        files: dict[int, bytes] = {}
        for index, file, offset, length in stored:
            if type(index) is not MetadataIndex:
                raise Unusual
            name = files.get(file)
            if name is None:
                name = files[file] = get(first_file + file)
            hint, at = index.index, index.offset
            entries.append(
                b"".join(
                    (
                        INDEX,
                        names.get(index.fqn) or self._string(index.fqn),
                        INDEX_HINT,
                        b"N" if hint is None else integer(hint),
                        INDEX_OFFSET,
                        b"N" if at is None else sizes[at],
                        INFO,
                        name,
                        INFO_OFFSET,
                        integer(offset),
                        INFO_LENGTH,
                        integer(length),
                        b"ub",
                    )
                )
            )
        return _batches(entries, b"u")


def _columns_of(result: Results) -> tuple[Columns, tuple[Numbers, Numbers, Numbers]] | None:
    """A rank's items and where they are, if both are columns and its files have names."""
    stored = result.stored
    items = stored.items.known_columns if isinstance(stored, PackedStored) else None
    if items is None or not isinstance(stored, PackedStored) or len(items) != len(stored):
        return None
    return (items, stored.where) if int(stored.where[0].max(initial=0)) < max(1, len(result.names)) else None


def write(
    described: Described,
    results: Sequence[Results],
    meta: Any,
    version: str | None,
    sums: Sums | None = None,
    holders: Mapping[str, str] | None = None,
) -> Content:
    """The content of `.metadata` in parts. Raises ``Unusual``."""
    names = [name for result in results for name in result.names]
    tables = described.rows(results)
    if tables is None:
        at, tables = described.next_number, [b"}"]
        for rank, result in enumerate(results):
            tables.append(described.stored(rank, result.stored, at))
            at += len(result.names)
    return [
        BEGIN,
        described.definitions,
        remembered([text_of(name) + PUT for name in names]),
        text_of("state_dict_metadata"),
        described.tensors,
        text_of("planner_data"),
        described.planner,
        text_of("storage_data"),
        *tables,
        b"" if sums is None else text_of(SUMS) + _sums(sums),
        b"" if holders is None else text_of(HOLDERS) + _holders(holders),
        text_of("version") + (b"N" if version is None else text_of(version)),
        # Last: `save_id_at_end` looks for it there.
        text_of("storage_meta") + _meta(meta) + b"ub.",
    ]


def _sums(sums: Sums) -> bytes:
    entries = []
    for (name, offset), digest in sums.items():
        at = b"N" if offset is None else tuple_of([integer(each) for each in offset])
        entries.append(tuple_of([text_of(name), at]) + text_of(digest))
    return b"}" + _batches(entries, b"u")


def _holders(holders: Mapping[str, str]) -> bytes:
    return b"}" + _batches([text_of(name) + text_of(ranks) for name, ranks in holders.items()], b"u")


def _meta(meta: Any) -> bytes:
    if meta is None:
        return b"N"
    if type(meta) is not StorageMeta or meta.modules != []:
        raise Unusual
    out = NAMES["StorageMeta"] + NEW + b"}("
    for name in ("checkpoint_id", "save_id", "load_id"):
        value = getattr(meta, name)
        if value is not None and type(value) is not str:
            raise Unusual
        out += text_of(name) + (b"N" if value is None else text_of(value))
    return out + text_of("modules") + b"]ub"
