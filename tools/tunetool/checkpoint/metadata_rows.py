"""Reads the two tables of `.metadata` that have rows for each tensor, as ``metadata_pickle`` writes them.

``pickled`` takes dozens of opcodes for a row; here a regular expression takes it whole. The expressions match what
``metadata_pickle`` writes and nothing else, and the values are those that ``pickled`` makes of it. From the first other
byte on ``pickled`` reads, and says what is wrong, if anything is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tunetool.checkpoint import metadata_opcodes as opcodes
from tunetool.checkpoint.pickled import Tables
from tunetool.checkpoint.plain import Malformed, count_hash


class _Other(Exception):
    """A value that ``metadata_pickle`` does not write."""


def _exactly(*parts: bytes) -> bytes:
    return re.escape(b"".join(parts))


_LONG = b"|".join(rb"%c.{%d}[\0-\x7f]" % (count, count - 1) for count in range(5, 9))
_NUMBER = rb"(?:K.|M..|J...[\0-\x7f]|\x8a(?:" + _LONG + rb"))"
_LENGTHS = rb"(\)|" + _NUMBER + rb"{1,3}[\x85-\x87]|\(" + _NUMBER + rb"{4,64}t)"
"""torch supports no more dimensions."""
_SIZE = _exactly(opcodes.SIZE) + _LENGTHS + rb"\x85R"
_NEXT = rb"(?:u\()?"
"""The end of a batch of rows and the beginning of the next one."""
_VALUE = rb"(h.|j.{4})"
"""A value of the memo."""
_CHUNK = _exactly(opcodes.CHUNK) + _SIZE + _exactly(opcodes.CHUNK_SIZES) + _SIZE + rb"ub"
_TENSOR = (
    (_exactly(opcodes.TENSOR, opcodes.PROPERTIES, opcodes.text_of("torch")) + rb"\x8c(.)([a-z0-9_]+)\x93")
    + (_exactly(opcodes.STRIDED) + rb"([\x88\x89])" + _exactly(opcodes.CONTIGUOUS) + rb"([\x88\x89])tb")
    + (_exactly(opcodes.NAMES["size"]) + _SIZE + _exactly(opcodes.NAMES["chunks"], b"]"))
)
_FEW = rb"(\((?:" + _CHUNK + rb"){1,8}e|)ub"
"""Chunks, and the end of the row. Of each repetition an expression remembers its state: more are read one by one."""
_TENSOR_ROW = re.compile(_NEXT + _VALUE + rb"(" + _exactly(opcodes.BYTES) + rb"|" + _TENSOR + _FEW + rb")", re.DOTALL)
_TENSOR_HEAD = re.compile(_NEXT + _VALUE + rb"(" + _TENSOR + rb")", re.DOTALL)
_PLACE_ROW = re.compile(
    (_NEXT + _exactly(opcodes.INDEX) + _VALUE)
    + (_exactly(opcodes.INDEX_HINT) + rb"(N|" + _NUMBER + rb")")
    + (_exactly(opcodes.INDEX_OFFSET) + rb"(?:N|" + _SIZE + rb")")
    + (_exactly(opcodes.INFO) + _VALUE + _exactly(opcodes.INFO_OFFSET) + rb"(" + _NUMBER + rb")")
    + (_exactly(opcodes.INFO_LENGTH) + rb"(" + _NUMBER + rb")ub"),
    re.DOTALL,
)
_ONE_NUMBER, _ONE_CHUNK = re.compile(_NUMBER, re.DOTALL), re.compile(_CHUNK, re.DOTALL)


def _number(raw: bytes) -> int:
    """The integer, which is not negative, of an opcode and its bytes."""
    return int.from_bytes(raw[2 if raw[0] == 0x8A else 1 :], "little")


class _Numbers(dict[bytes, int]):
    """By their opcodes: the same ones occur in many rows."""

    def __missing__(self, raw: bytes) -> int:
        made = self[raw] = _number(raw)
        return made


class _Sizes(dict[bytes, torch.Size]):
    """By the opcodes of a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self._hashes: dict[int, int] = {}

    def __missing__(self, raw: bytes) -> torch.Size:
        lengths = [_number(each) for each in _ONE_NUMBER.findall(raw, raw[0] == 0x28, len(raw) - 1)]
        if lengths and raw[0] != 0x28 and raw[-1] != 0x84 + len(lengths):
            raise _Other
        made = self[raw] = torch.Size(lengths)
        # Of items of one tensor, the offset alone makes the difference.
        count_hash(made, self._hashes)
        return made


class _Texts(dict[bytes, str]):
    """Texts of the memo, by the opcodes that refer to them."""

    def __init__(self, memo: Sequence[Any]) -> None:
        super().__init__()
        self._memo = memo

    def __missing__(self, raw: bytes) -> str:
        text = self._memo[int.from_bytes(raw[1:], "little")]
        if type(text) is not str:
            raise _Other
        self[raw] = text
        return text


_Form = tuple[TensorProperties, torch.Size, list[tuple[torch.Size, torch.Size]]]


def _form(row: re.Match[bytes], chunks: bytes, properties: dict[Any, TensorProperties], sizes: _Sizes) -> _Form:
    """What all tensors with these opcodes have in common: properties, size, and the bounds of the chunks."""
    length, name, *truths = row.group(3, 4, 5, 6)
    dtype = torch.__dict__.get(name.decode())
    if length[0] != len(name) or type(dtype) is not torch.dtype:
        raise _Other
    requires_grad, pin_memory = (truth == b"\x88" for truth in truths)
    key = dtype, requires_grad, pin_memory
    if key not in properties:
        properties[key] = TensorProperties(
            dtype, torch.strided, requires_grad, torch.contiguous_format, pin_memory=pin_memory
        )
    size = sizes[row[7]]
    bounds = [(sizes[offsets], sizes[lengths]) for offsets, lengths in _ONE_CHUNK.findall(chunks)]
    if any(len(size) != len(part) for both in bounds for part in both):
        raise _Other
    return properties[key], size, bounds


def _after_chunks(content: bytes, end: int) -> int:
    """Where a row ends whose chunks begin at ``end``."""
    while content[end] == 0x28:
        begin = end = end + 1
        while chunk := _ONE_CHUNK.match(content, end):
            end = chunk.end()
        if end == begin or content[end] != 0x65:
            raise _Other
        end += 1
    if content[end : end + 2] != b"ub":
        raise _Other
    return end + 2


def _tensors(content: bytes, end: int, memo: Sequence[Any]) -> tuple[int, dict[str, Any]]:
    """Where the rows end that begin at ``end``, and what they say."""
    names, sizes, properties = _Texts(memo), _Sizes(), dict[Any, TensorProperties]()
    match, forms, filled = _TENSOR_ROW.match, dict[bytes, _Form](), dict[str, Any]()
    while row := match(content, end) or _TENSOR_HEAD.match(content, end):
        end = row.end()
        name, described = row.group(1, 2)
        if described == opcodes.BYTES:
            filled[names[name]] = BytesStorageMetadata()
            continue
        if row.re is _TENSOR_HEAD:
            begin, end = end, _after_chunks(content, end)
            its, size, bounds = _form(row, content[begin:end], properties, sizes)
        else:
            form = forms.get(described)
            if form is None:
                form = forms[described] = _form(row, row[8], properties, sizes)
            its, size, bounds = form
        filled[names[name]] = TensorStorageMetadata(its, size, [ChunkStorageMetadata(*each) for each in bounds])
    return end, filled


def _places(content: bytes, end: int, memo: Sequence[Any]) -> tuple[int, dict[MetadataIndex, _StorageInfo]]:
    """The same of the table of files."""
    texts, sizes, numbers, new = _Texts(memo), _Sizes(), _Numbers(), object.__new__
    match, filled = _PLACE_ROW.match, dict[MetadataIndex, _StorageInfo]()
    while row := match(content, end):
        end = row.end()
        name, hint, at, file, offset, length = row.groups()
        # Their own constructors take five times as long.
        index, place = new(MetadataIndex), new(_StorageInfo)
        fields = index.__dict__
        fields["fqn"] = texts[name]
        fields["index"] = None if hint == b"N" else numbers[hint]
        fields["offset"] = None if at is None else sizes[at]
        fields = place.__dict__
        fields["relative_path"], fields["offset"], fields["length"] = texts[file], _number(offset), numbers[length]
        filled[index] = place
    return end, filled


def _filled(
    values: Callable[[bytes, int, Sequence[Any]], tuple[int, dict[Any, Any]]],
    known: Sequence[Any],
    content: bytes,
    start: int,
    memo: Sequence[Any],
    table: dict[Any, Any],
) -> int:
    """Fill the table, whose rows begin at ``start``. Returns where they end; ``start`` where one is no such row."""
    if memo[: len(known)] != known:
        return start
    try:
        end, filled = values(content, start + 1, memo)
    except (_Other, Malformed, IndexError):
        return start
    if content[end : end + 1] != b"u":
        return start
    table.update(filled)
    return end + 1


def tables(known: Sequence[Any], content: bytes) -> Tables:
    """For ``Vocabulary``; none where ``metadata_pickle`` has not written the content.

    ``known``: what the memo begins with.
    """
    if not opcodes.FIELDS_KNOWN or not content.startswith(opcodes.BEGIN):
        return {}
    found: dict[int, Callable[[Sequence[Any], dict[Any, Any]], int]] = {}
    readers: dict[str, Callable[..., Any]] = {"state_dict_metadata": _tensors, "storage_data": _places}
    for name, values in readers.items():
        before = opcodes.text_of(name) + b"}"
        start = content.find(before + b"(") + len(before)
        if start >= len(before):
            found[start] = partial(_filled, values, known, content, start)
    return found
