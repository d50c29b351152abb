"""The header of a .safetensors file, checked as the safetensors library checks it.

A file is the header's length (8 bytes, little-endian), the header (JSON), and the tensors' bytes. What the library
refuses (safetensors/src/tensor.rs) is refused here, for a reader that trusted such a header would load wrong values.
One thing more is refused: two tensors of one name, of which the library takes the last.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tunetool import regular_files

START = 8
"""Bytes in front of the header, which hold its length."""
LARGEST = 100_000_000
"""Bytes of a header; the library's own limit."""
BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Of one element, by the library's names of dtypes."""
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "BF16": "bfloat16",
    "F16": "float16",
    "I16": "int16",
    "F32": "float32",
    "I32": "int32",
    "F64": "float64",
    "I64": "int64",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "C64": "complex64",
}
"""torch's dtype names, by the names in safetensors files."""
_METADATA = "__metadata__"
_FIELDS = ("dtype", "shape", "data_offsets")
_NESTED = 127
"""Levels, which the library's JSON reader allows."""
_SIZE = 1 << 64
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Invalid(ValueError):
    """No header that the library would take; says why, in few words."""


class CutShort(Invalid):
    """The file ends within its header; says so after `is`."""


class Entry(NamedTuple):
    """One tensor: ``dtype`` as the library names it; its bytes are [``begin``, ``end``) behind the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """Of a file of ``size`` bytes, whose tensors' bytes begin at ``begin``."""

    entries: tuple[Entry, ...]
    begin: int
    size: int

    @property
    def end(self) -> int:
        """The size that the file must have."""
        return self.begin + (self.entries[-1].end if self.entries else 0)


def read(path: Path) -> Header:
    """The header of the file at ``path``, whose size is not compared. Raises ``OSError`` as ``open_regular`` does,
    ``Invalid``, and ``regular_files.Pointer``."""
    with os.fdopen(regular_files.open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < regular_files.POINTER_BYTES:
            regular_files.refuse_pointer(path, file.read(regular_files.POINTER_BYTES))
            file.seek(0)
        count = length(file.read(START))
        header = file.read(count)
    if len(header) < count:
        raise CutShort(f"cut short: {size} bytes, its list of tensors alone takes {START + count}")
    return Header(entries(header), START + count, size)


def length(start: bytes) -> int:
    """Bytes of the header that follows these 8. Raises ``Invalid``."""
    if len(start) < START:
        raise Invalid("it is shorter than 8 bytes")
    count = int(struct.unpack_from("<Q", start)[0])
    if count > LARGEST:
        raise Invalid(f"its header would be {count} bytes long")
    return count


def entries(header: bytes) -> tuple[Entry, ...]:
    """The tensors, in the order in which they lie in the file; their bytes follow one another from 0 on without a gap.

    ``header`` is the JSON alone. The file must be ``START`` + the header's length + the last ``end`` bytes long, which
    the caller checks. Raises ``Invalid``.
    """
    listed = sorted(_listed(_parsed(header)), key=lambda entry: (entry.begin, entry.end))
    at = 0
    for entry in listed:
        if entry.begin != at or entry.end < at:
            raise Invalid(f"{_shown(entry.name)} lies at {entry.begin} to {entry.end}, and {at} is where it must begin")
        at = entry.end
        bits = _bits(entry)
        if bits % 8 or bits // 8 != entry.end - entry.begin:
            raise Invalid(
                f"{_shown(entry.name)} is {entry.end - entry.begin} bytes long, and its shape and dtype "
                f"{entry.dtype} take {bits / 8:g}"
            )
    return tuple(listed)


def _bits(entry: Entry) -> int:
    count = 1
    for size in (*entry.shape, BITS[entry.dtype]):
        count *= size
        # In this order, so that a 0 does not excuse what came before it.
        if count >= _SIZE:
            raise Invalid(f"{_shown(entry.name)} has more elements than can be counted")
    return count


def _shown(name: str) -> str:
    return ascii(name if len(name) <= 200 else f"{name[:200]}...")


class _Object(tuple[tuple[str, Any], ...]):
    """A JSON object as its pairs: two of one name stay two."""

    __slots__ = ()


def _parsed(header: bytes) -> _Object:
    try:
        text = header.decode("utf-8")
        document = json.loads(
            text, object_pairs_hook=_Object, parse_int=_integer, parse_float=_real, parse_constant=_constant
        )
    except Invalid:
        raise
    except RecursionError:
        raise Invalid("its header is nested too deeply") from None
    except ValueError:
        raise Invalid("its header is not JSON") from None
    if type(document) is not _Object:
        raise Invalid("its header is not a JSON object")
    _check_nesting(document)
    # JSON of Python's takes half a character, written as `\\ud800`; then it stands in the text alone.
    if _SURROGATE.search(text) and any("\ud800" <= each <= "\udfff" for part in _texts(document) for each in part):
        raise Invalid("its header holds half a character")
    return document


def _integer(text: str) -> int | float:
    # Of a fraction the library's reader makes these two, too.
    return -0.0 if text == "-0" or (len(text) > 40 and math.isfinite(_real(text))) else int(text)


def _real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Invalid("its header holds a number that is too large")
    return value


def _constant(text: str) -> NoReturn:
    raise Invalid(f"its header holds `{text}`")


def _below(level: list[Any]) -> list[Any]:
    """The values one level deeper."""
    below: list[Any] = []
    for value in level:
        if type(value) is _Object:
            below += [part for _, part in value]
        elif type(value) is list:
            below += value
    return below


def _check_nesting(document: _Object) -> None:
    level: list[Any] = [document]
    for _ in range(_NESTED):
        level = _below(level)
        if not level:
            return
    if any(type(value) in (_Object, list) for value in level):
        raise Invalid("its header is nested too deeply")


def _texts(document: _Object) -> Iterator[str]:
    level: list[Any] = [document]
    while level:
        for value in level:
            if type(value) is str:
                yield value
            elif type(value) is _Object:
                yield from (name for name, _ in value)
        level = _below(level)


def _listed(document: _Object) -> Iterator[Entry]:
    names: set[str] = set()
    for name, value in document:
        if name in names:
            raise Invalid(f"its header lists {_shown(name)} twice")
        names.add(name)
        if name == _METADATA:
            _check_metadata(value)
        else:
            yield _entry(name, value)


def _check_metadata(metadata: Any) -> None:
    if metadata is not None and (type(metadata) is not _Object or not all(type(value) is str for _, value in metadata)):
        raise Invalid(f"its `{_METADATA}` is not a table of texts")


def _entry(name: str, description: Any) -> Entry:
    if type(description) is list:
        # The library takes the three values without their names, too.
        fields = dict(zip(_FIELDS, description, strict=True)) if len(description) == len(_FIELDS) else {}
    elif type(description) is _Object:
        known = [(field, value) for field, value in description if field in _FIELDS]
        fields = dict(known) if len(known) == len(_FIELDS) else {}
    else:
        fields = {}
    if len(fields) != len(_FIELDS):
        raise Invalid(f"{_shown(name)} is not described by dtype, shape and data_offsets, each once")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if type(dtype) is _Object and len(dtype) == 1 and dtype[0][1] is None:
        dtype = dtype[0][0]
    if type(dtype) is not str or dtype not in BITS:
        raise Invalid(f"{_shown(name)} has a dtype that safetensors does not know")
    if not _are_sizes(shape):
        raise Invalid(f"{_shown(name)} has a shape that is not a list of whole numbers")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise Invalid(f"{_shown(name)} has data_offsets that are not two whole numbers")
    return Entry(name, dtype, tuple(shape), *offsets)


def _are_sizes(values: Any) -> bool:
    return type(values) is list and all(type(value) is int and 0 <= value < _SIZE for value in values)
