"""Finds the raw bytes of a tensor within its item, which is an archive of that one tensor as ``torch.save`` writes it.

Such an archive is an uncompressed zip with the records ``data.pkl`` (a pickle that says how to rebuild the tensor),
``byteorder`` and ``data/0`` (the raw bytes). It is read with the standard library alone; nothing that the pickle names
is run.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tunetool.checkpoint import pickled, plain
from tunetool.checkpoint.items import STORAGES
from tunetool.checkpoint.raw_bytes import ITEM_SIZES, Plain

HEAD = TAIL = 4096
"""Bytes at each end of an item that contain everything this module reads."""

_DTYPES = {storage: dtype for dtype, storage in STORAGES.items()}


class _NotPlain(Exception):
    """Not an archive of one plain tensor."""


@dataclass(frozen=True)
class _Record:
    header: int
    size: int


def find(read: Callable[[int, int], bytes], length: int) -> Plain | None:
    """The tensor in an item of ``length`` bytes; ``read(offset, count)`` returns bytes of the item.

    None if only ``torch.load`` can read the item: another layout, byte order or kind of object.
    """
    try:
        return _find(read, length)
    except (_NotPlain, pickled.Refused, struct.error, LookupError, TypeError, ValueError):
        return None


def _find(read: Callable[[int, int], bytes], length: int) -> Plain:
    records = _records(read, length)
    prefix = next(iter(records)).partition("/")[0]

    def content(name: str) -> bytes:
        record = records[f"{prefix}/{name}"]
        return read(_start(read, record), record.size)

    if content("byteorder") != b"little":
        raise _NotPlain
    pickle = content("data.pkl")
    dtype, shape = _known_tensor(pickle) if len(pickle) <= _SHORT else _tensor(pickle)
    raw = records[f"{prefix}/data/0"]
    start = _start(read, raw)
    if raw.size != math.prod(shape) * ITEM_SIZES[dtype] or start + raw.size > length:
        raise _NotPlain
    return Plain(start, raw.size, dtype, shape)


_END = struct.Struct("<4s4H2IH")
_END_64_LOCATOR = struct.Struct("<4sIQI")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s4x2H8x2I3H8xI")
_LOCAL_NAMES = struct.Struct("<26x2H")


def _records(read: Callable[[int, int], bytes], length: int) -> dict[str, _Record]:
    """The zip's central directory (PKWARE APPNOTE.TXT, 4.3.6 and on)."""
    end = _END.unpack(read(length - _END.size, _END.size))
    count, size, offset = end[4], end[5], end[6]
    at_64 = length - _END.size - _END_64_LOCATOR.size
    signature, _, where, _ = _END_64_LOCATOR.unpack(read(at_64, _END_64_LOCATOR.size)) if at_64 > 0 else (b"", 0, 0, 0)
    if signature == b"PK\6\7":
        end_64 = _END_64.unpack(read(where, _END_64.size))
        count, size, offset = end_64[7], end_64[8], end_64[9]
    if end[0] != b"PK\5\6" or end[7] or not 0 < count <= 64 or size > TAIL:
        raise _NotPlain
    directory = read(offset, size)
    return _known_entries(directory, count) if size <= _SHORT else _entries(directory, count)


def _entries(directory: bytes, count: int) -> dict[str, _Record]:
    """The records of the directory. Callers must not change the table."""
    records: dict[str, _Record] = {}
    position = 0
    for _ in range(count):
        signature, flags, method, packed, unpacked, name_length, extra_length, comment, header = _ENTRY.unpack_from(
            directory, position
        )
        position += _ENTRY.size
        name = directory[position : position + name_length].decode("utf-8")
        extra = directory[position + name_length : position + name_length + extra_length]
        position += name_length + extra_length + comment
        if _IN_EXTRA_FIELD in (packed, unpacked, header):
            unpacked, packed, header = _from_extra(extra, unpacked, packed, header)
        if signature != b"PK\1\2" or method or flags & 1 or packed != unpacked:
            raise _NotPlain
        # Another reader could pick the other of two records with the same name.
        if name in records:
            raise _NotPlain
        records[name] = _Record(header, unpacked)
    return records


# Of tensors with the same shape and dtype, the directories are the same bytes, and so are the pickles.
_REMEMBERED, _SHORT = 1024, 2048
"""Number of results that are remembered, and the most bytes that one is of: memory is bounded, whatever files hold."""
_known_entries = lru_cache(_REMEMBERED)(_entries)
_IN_EXTRA_FIELD = 0xFFFFFFFF


def _from_extra(extra: bytes, *values: int) -> tuple[int, ...]:
    """``values`` with those that exceed 32 bits replaced from the extra field 0x0001, which holds them in this
    order."""
    while extra:
        kind, size = struct.unpack_from("<2H", extra)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{size // 8}Q", extra, 4))
            return tuple(next(wide) if value == _IN_EXTRA_FIELD else value for value in values)
        extra = extra[4 + size :]
    return values


def _start(read: Callable[[int, int], bytes], record: _Record) -> int:
    name, extra = _LOCAL_NAMES.unpack(read(record.header, 30))
    return record.header + 30 + int(name) + int(extra)


@dataclass(frozen=True)
class _Storage:
    dtype: str | None
    count: int


def _storage(pid: Any) -> _Storage:
    _, kind, key, _, count = pid
    if key != "0" or type(kind) is not str or type(count) is not int:
        raise _NotPlain
    return _Storage(_DTYPES.get(kind), count)


def _v2(storage: _Storage, offset: int, shape: Any, stride: Any, requires_grad: bool, hooks: Any) -> Any:
    if type(storage) is not _Storage or storage.dtype is None:
        raise _NotPlain
    return storage.dtype, _contiguous(storage.count, offset, shape, stride)


def _v3(storage: _Storage, offset: int, shape: Any, stride: Any, requires_grad: bool, hooks: Any, dtype: str) -> Any:
    if type(storage) is not _Storage:
        raise _NotPlain
    # An untyped storage counts bytes.
    return dtype, _contiguous(storage.count // ITEM_SIZES[dtype], offset, shape, stride)


def _contiguous(count: int, offset: int, shape: Any, stride: Any) -> tuple[int, ...]:
    """The shape. Raises ``_NotPlain`` unless the elements lie in C order and fill the storage."""
    if (
        type(shape) is not tuple
        or len(shape) > _DIMENSIONS
        or not all(type(size) is int and size >= 0 for size in shape)
    ):
        raise _NotPlain
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected and math.prod(shape):
            raise _NotPlain
        expected *= size
    if offset or count != math.prod(shape):
        raise _NotPlain
    return shape


_DIMENSIONS = 64
"""torch supports no more, and multiplying many lengths takes long."""

# What the pickle of a saved tensor calls, replaced by our own functions: nothing of torch runs here.
_TENSOR_PICKLE = pickled.Vocabulary(
    {
        ("torch._utils", "_rebuild_tensor_v2"): pickled.Call(_v2),
        ("torch._utils", "_rebuild_tensor_v3"): pickled.Call(_v3),
        **{("torch", name): name for name in (*_DTYPES, *ITEM_SIZES)},
        ("torch.storage", "UntypedStorage"): "UntypedStorage",
        ("collections", "OrderedDict"): pickled.Call(plain.ordered_dict),
    },
    persistent=_storage,
)


def _tensor(content: bytes) -> tuple[str, tuple[int, ...]]:
    described = pickled.load(content, _TENSOR_PICKLE)
    if not (
        type(described) is tuple and len(described) == 2 and described[0] in ITEM_SIZES and type(described[1]) is tuple
    ):
        raise _NotPlain
    return described


_known_tensor = lru_cache(_REMEMBERED)(_tensor)
