"""What `.metadata` is made of where ``metadata_pickle`` writes it: the opcodes of values and rows, and its beginning.

``metadata_rows`` reads the same rows.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

BATCH = 1000
"""Entries of a table or a list that are put there at a time, as by Python's pickler."""
NEW = b")\x81"
PUT = b"\x94"
"""Remember the value in the memo."""
_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_FIELDS: dict[type, set[str]] = {
    Metadata: {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"},
    TensorStorageMetadata: {"properties", "size", "chunks"},
    BytesStorageMetadata: set(),
    ChunkStorageMetadata: {"offsets", "sizes"},
    TensorProperties: {"dtype", "layout", "requires_grad", "memory_format", "pin_memory"},
    MetadataIndex: {"fqn", "offset", "index"},
    StorageMeta: {"checkpoint_id", "save_id", "load_id", "modules"},
    _StorageInfo: {"relative_path", "offset", "length", "transform_descriptors"},
}
FIELDS_KNOWN = all({field.name for field in dataclasses.fields(kind)} == names for kind, names in _FIELDS.items())
"""Whether torch's classes have the fields that this module knows; a version with others is left to Python's pickler."""


class Unusual(Exception):
    """The metadata holds something that this module does not write."""


def text_of(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"\x8c" + bytes([len(raw)]) + raw if len(raw) < 256 else b"X" + struct.pack("<I", len(raw)) + raw


def integer(value: Any) -> bytes:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise Unusual
    if value < 1 << 8:
        return b"K" + bytes([value])
    if value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(raw)]) + raw


def get(number: int) -> bytes:
    return b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)


def tuple_of(parts: Sequence[bytes]) -> bytes:
    if len(parts) > 3:
        return b"(" + b"".join(parts) + b"t"
    return b"".join(parts) + (bytes([0x84 + len(parts)]) if parts else b")")


CLASSES = [
    *((_METADATA, kind.__name__) for kind in _FIELDS if kind is not _StorageInfo),
    (_FILES, "_StorageInfo"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
]
"""Module and name of what the memo begins with."""
WORDS = ["fqn", "index", "offset", "relative_path", "length", "offsets", "sizes", "properties", "size", "chunks"]
"""What follows them there."""


def _globals() -> tuple[bytes, dict[str, bytes]]:
    """The beginning of every file, and how to refer to each name in it."""
    values = [text_of(module) + text_of(name) + b"\x93" + PUT for module, name in CLASSES]
    values += [text_of(word) + PUT for word in WORDS]
    names = [*(name for _, name in CLASSES), *WORDS]
    # The metadata's own class, the first value, is also what the file begins with: an object, and its table of fields.
    out = b"\x80\x04" + values[0] + NEW + b"}(" + remembered(values[1:])
    return out, {name: get(number) for number, name in enumerate(names)}


def remembered(values: Sequence[bytes]) -> bytes:
    """Values for the memo, within the table of the metadata's fields."""
    groups = (values[first : first + BATCH] for first in range(0, len(values), BATCH))
    return b"".join(text_of("version") + b"(" + b"".join(group) + b"t" for group in groups)


BEGIN, NAMES = _globals()
SIZE = NAMES["Size"]
INDEX = NAMES["MetadataIndex"] + NEW + b"}(" + NAMES["fqn"]
INDEX_HINT, INDEX_OFFSET = NAMES["index"], NAMES["offset"]
INFO = b"ub" + NAMES["_StorageInfo"] + NEW + b"}(" + NAMES["relative_path"]
INFO_OFFSET, INFO_LENGTH = NAMES["offset"], NAMES["length"]
CHUNK = NAMES["ChunkStorageMetadata"] + NEW + b"}(" + NAMES["offsets"]
CHUNK_SIZES = NAMES["sizes"]
TENSOR = NAMES["TensorStorageMetadata"] + NEW + b"}(" + NAMES["properties"]
BYTES = NAMES["BytesStorageMetadata"] + NEW
PROPERTIES = NAMES["TensorProperties"] + NEW + b"("
STRIDED = NAMES["_get_layout"] + text_of("torch.strided") + b"\x85R"
CONTIGUOUS = NAMES["_MEM_FORMAT_ENCODING"] + b"K\x00\x85R"
TRUTH = {True: b"\x88", False: b"\x89"}
