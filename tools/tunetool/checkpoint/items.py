"""A tensor in a data file: a `torch.save` archive around raw bytes that, from 64 KiB on, begin at a multiple of 4096.

torch.distributed.checkpoint's FileSystemReader slices an item out of its file and gives it to ``torch.load``, so each
item is an uncompressed zip with the records that ``torch.load`` reads. Everything before the raw bytes (``head``) and
the length of everything after them (``tail_bytes``) are known without the data, so a whole file is laid out before the
first byte is copied. The CRC-32 of the raw bytes is 0: torch does not check it (``set_crc32_options``).
Source: torch/serialization.py, and the output of ``torch.save``, with which the tests compare.

Pure: no torch here; dtypes go by torch's names (``bfloat16``).
"""

from __future__ import annotations

import math
import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from tunetool.checkpoint.raw_bytes import BLOCK, Plain, strides

LARGE = 1 << 20
"""Bytes. Items of at least this size start at a block of their own, so that they can be written alone."""
SMALL = 64 << 10
"""Bytes. Smaller tensors are not aligned to blocks: 20,000 tensors of a few bytes would take 86 MB."""
ALIGNMENT = 64
"""Alignment in bytes of the raw bytes of small tensors, as in torch's own archives."""
STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
}
"""dtypes with a storage class of their own in torch's format; the pickle names all other dtypes directly."""

_U32 = 0xFFFFFFFF


def round_up(value: int, to: int = BLOCK) -> int:
    return -(-value // to) * to


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + struct.pack("<B", value)
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(raw)]) + raw


class _Pickle:
    """Writes the opcodes of protocol 2 that a saved tensor needs, with the memo that Python's pickler would write."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self.memo = 0

    def put(self, raw: bytes) -> None:
        self.out += raw + b"q" + bytes([self.memo])
        self.memo += 1

    def text(self, value: str) -> None:
        self.put(b"X" + struct.pack("<I", len(value)) + value.encode())

    def integers(self, values: Sequence[int]) -> None:
        raw = b"".join(map(_integer, values))
        if not values:
            self.out += b")"
        elif len(values) <= 3:
            self.put(raw + bytes([0x84 + len(values)]))
        else:
            self.put(b"(" + raw + b"t")


def data_pickle(dtype: str, shape: Sequence[int], data_bytes: int) -> bytes:
    """``data.pkl`` of one contiguous CPU tensor without gradient, identical to the bytes that torch writes."""
    storage = STORAGES.get(dtype)
    pickle = _Pickle()
    pickle.put(b"ctorch._utils\n_rebuild_tensor_%s\n" % (b"v2" if storage else b"v3"))
    pickle.out += b"(("
    pickle.text("storage")
    pickle.put(b"ctorch\n%s\n" % storage.encode() if storage else b"ctorch.storage\nUntypedStorage\n")
    pickle.text("0")
    pickle.text("cpu")
    pickle.put(_integer(math.prod(shape) if storage else data_bytes) + b"t")
    pickle.out += b"QK\x00"
    pickle.integers(shape)
    pickle.integers(strides(shape))
    pickle.put(b"\x89ccollections\nOrderedDict\n")
    pickle.put(b")R")
    if not storage:
        pickle.put(b"ctorch\n%s\n" % dtype.encode())
    pickle.put(b"t")
    pickle.put(b"R")
    return bytes(pickle.out + b".")


@dataclass(frozen=True)
class _Record:
    """One member of the zip, at ``offset`` in the archive."""

    name: bytes
    offset: int
    length: int
    crc: int

    @property
    def local(self) -> bytes:
        wide = struct.pack("<HHQQ", 1, 16, self.length, self.length) if self.length >= _U32 else b""
        size = min(self.length, _U32)
        fixed = (0x04034B50, 45 if wide else 20, 0, 0, 0, 0x21, self.crc, size, size, len(self.name), len(wide))
        return struct.pack("<IHHHHHIIIHH", *fixed) + self.name + wide

    @property
    def central(self) -> bytes:
        numbers = [self.length] * 2 * (self.length >= _U32) + [self.offset] * (self.offset >= _U32)
        wide = struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
        need, size = (45 if wide else 20), min(self.length, _U32)
        fixed = (0x02014B50, need, need, 0, 0, 0, 0x21, self.crc, size, size, len(self.name), len(wide), 0, 0, 0, 0)
        return struct.pack("<IHHHHHHIIIHHHHHII", *fixed, min(self.offset, _U32)) + self.name + wide


@dataclass(frozen=True)
class Archive:
    """One tensor's archive: ``head``, ``data_bytes`` raw bytes, ``tail``. ``shape`` is in elements."""

    dtype: str
    shape: tuple[int, ...]
    data_bytes: int

    @cached_property
    def _before(self) -> tuple[bytes, list[_Record]]:
        out, records = b"", []
        contents = (
            (b"archive/data.pkl", data_pickle(self.dtype, self.shape, self.data_bytes)),
            (b"archive/byteorder", sys.byteorder.encode()),
            (b"archive/version", b"3\n"),
        )
        for name, content in contents:
            record = _Record(name, len(out), len(content), zlib.crc32(content))
            out += record.local + content
            records.append(record)
        data = _Record(b"archive/data/0", len(out), self.data_bytes, 0)
        return out + data.local, [*records, data]

    @cached_property
    def head(self) -> bytes:
        return self._before[0]

    @cached_property
    def tail_bytes(self) -> int:
        return len(self.tail)

    @cached_property
    def length(self) -> int:
        return len(self.head) + self.data_bytes + self.tail_bytes

    @cached_property
    def plain(self) -> Plain:
        """The tensor within it."""
        return Plain(len(self.head), self.data_bytes, self.dtype, tuple(self.shape))

    @cached_property
    def tail(self) -> bytes:
        head, records = self._before
        at, count = len(head) + self.data_bytes, len(records)
        directory = b"".join(record.central for record in records)
        out = directory
        if at >= _U32:
            out += struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, len(directory), at)
            out += struct.pack("<IIQI", 0x07064B50, 0, at + len(directory), 1)
        return out + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, len(directory), min(at, _U32), 0)


@lru_cache(4096)
def archive(dtype: str, shape: tuple[int, ...], data_bytes: int) -> Archive:
    """The ``Archive`` for these parameters, cached: a model has few different shapes, and making one takes 0.1 ms."""
    return Archive(dtype, shape, data_bytes)


class Placed(NamedTuple):
    """The byte range of an item in its file: ``offset`` and ``length`` go to the metadata; the raw bytes begin at
    ``data``."""

    offset: int
    data: int
    length: int


def place(contents: Sequence[Archive | int]) -> tuple[list[Placed], int]:
    """Place items one after another; an ``int`` is an object of that many bytes. Returns also the file size in bytes,
    a multiple of 4096."""
    placed: list[Placed] = []
    at = 0
    for content in contents:
        if isinstance(content, int):
            placed.append(Placed(at, at, content))
            at += content
            continue
        head, large = len(content.head), content.data_bytes >= LARGE
        at, alignment = round_up(at) if large else at, ALIGNMENT if content.data_bytes < SMALL else BLOCK
        data = -(-(at + head) // alignment) * alignment
        placed.append(Placed(data - head, data, content.length))
        at = data - head + content.length
        at = round_up(at) if large else at
    return placed, round_up(at)
