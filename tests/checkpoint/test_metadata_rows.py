"""The rows of `.metadata` that are read by expressions are what the opcodes say, and damaged ones are refused alike."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
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

from tunetool.checkpoint import metadata, pickled
from tunetool.checkpoint import metadata_opcodes as opcodes
from tunetool.checkpoint.packed import Packed, Results
from tunetool.checkpoint.vocabulary import VOCABULARY

BY_OPCODES = dataclasses.replace(VOCABULARY, tables=lambda content: {})
SHAPES = [(), (7,), (300, 2), (2, 70_000, 1), (1, 2, 3, 1 << 33)]


def content(repeated: int = 1, many: int = 12) -> bytes:
    """Tensors of several shapes and dtypes, in one chunk, in two and in ``many``, and an object."""
    tensors: dict[str, Any] = {"step": BytesStorageMetadata()}
    stored = [(MetadataIndex("step"), 1, 5, 300)]
    for number in range(repeated * len(SHAPES)):
        shape, name = SHAPES[number % len(SHAPES)], f"t{number}"
        first = torch.Size([0] * len(shape))
        chunks = [ChunkStorageMetadata(first, torch.Size(shape))]
        if shape and number % 3 == 2:
            last = torch.Size([1 << 20, *first[1:]])
            chunks.append(ChunkStorageMetadata(last, torch.Size(shape)))
        if shape and number % 10 == 6:
            rows = (torch.Size([at, *first[1:]]) for at in range(many))
            chunks += [ChunkStorageMetadata(row, torch.Size(shape)) for row in rows]
        its = TensorProperties([torch.float32, torch.bfloat16][number % 2], requires_grad=number % 4 == 3)
        tensors[name] = TensorStorageMetadata(its, torch.Size(shape), chunks)
        stored += [(MetadataIndex(name, chunk.offsets, at), 0, number << 20, 9) for at, chunk in enumerate(chunks)]
    described = Metadata(tensors, {"step": ("step",)}, storage_meta=StorageMeta("/a", "0123456789abcdef"))
    parts = metadata.content_of(described, [Results(Packed(stored), ("__0_0.distcp", "__0_1.distcp"))], Path("/a"))
    return metadata.without_sum(b"".join(parts))


def parts(value: Any, levels: int = 12) -> Any:
    """What the value is made of: torch compares no numbers of chunks, and nothing whose fields are missing."""
    if not levels:
        return type(value)
    if isinstance(value, dict):
        return [(parts(key, levels - 1), parts(each, levels - 1)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [parts(each, levels - 1) for each in value]
    fields = getattr(value, "__dict__", None)
    return value if fields is None else (type(value), parts(fields, levels - 1))


def outcome(raw: bytes, vocabulary: pickled.Vocabulary) -> Any:
    try:
        return parts(pickled.load(raw, vocabulary))
    except Exception as error:
        return type(error), str(error)


def test_rows_are_what_the_opcodes_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for raw in (content(2), content(repeated=100), content(2, many=2500)):
        expected = outcome(raw, BY_OPCODES)
        assert expected[0] is Metadata
        with monkeypatch.context() as patched:
            for (_, name), kind in VOCABULARY.names.items():
                if name in ("TensorStorageMetadata", "MetadataIndex"):
                    patched.setattr(kind, "fill", lambda *_: pytest.fail("a row is read by opcodes"))
            assert outcome(raw, VOCABULARY) == expected


def test_a_damaged_byte_is_taken_as_by_the_opcodes() -> None:
    raw, drawn = content(2), random.Random(1)
    start = raw.index(b"state_dict_metadata}(") - 40
    for at in range(start, len(raw)):
        for value in {raw[at] ^ 1 << drawn.randrange(8), drawn.randrange(256)}:
            damaged = raw[:at] + bytes([value]) + raw[at + 1 :]
            assert outcome(damaged, VOCABULARY) == outcome(damaged, BY_OPCODES), f"{value} at {at}"


def test_rows_that_are_lost_or_twice_are_taken_alike() -> None:
    raw, drawn = content(), random.Random(2)
    start = raw.index(b"state_dict_metadata}(")
    for _ in range(300):
        low, high = sorted(drawn.randrange(start, len(raw)) for _ in range(2))
        for changed in (raw[:low] + raw[high:], raw[:high] + raw[low:]):
            assert outcome(changed, VOCABULARY) == outcome(changed, BY_OPCODES)


def test_chunks_of_a_row_take_no_memory_of_their_own() -> None:
    """An expression that repeats a part remembers its state for each time."""
    row = content(2, many=1)
    begin = row.index(b"]", row.index(opcodes.NAMES["chunks"], row.index(b"state_dict_metadata"))) + 1
    hostile = row[:begin] + b"(e" * 200_000 + row[begin:]
    tracemalloc.start()
    try:
        assert outcome(hostile, VOCABULARY) == outcome(hostile, BY_OPCODES)
        assert tracemalloc.get_traced_memory()[1] < 20 * len(hostile)
    finally:
        tracemalloc.stop()


def test_offsets_with_one_hash_are_refused_after_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of these have it. Each would be compared with all before."""
    modulus, compared = (1 << 61) - 1, 0
    steps = itertools.product(range(0, 4 * modulus, modulus), repeat=5)
    offsets = [torch.Size(step) for step in steps]
    assert len({*map(hash, offsets)}) == 1
    stored = [(MetadataIndex("w", at, number), 0, 0, 9) for number, at in enumerate(offsets)]
    ours = [Results(Packed(stored), ("__0_0.distcp",))]
    written = metadata.without_sum(b"".join(metadata.content_of(Metadata({}), ours, Path("/a"))))
    with monkeypatch.context() as patched:
        patched.setattr(MetadataIndex, "__hash__", object.__hash__)
        by_torch = {index: _StorageInfo("__0_0.distcp", 0, 9) for index, *_ in stored}
        pickled_by_torch = pickle.dumps(Metadata({}, storage_data=by_torch))
        in_sets = pickle.dumps(Metadata({}, planner_data={"w": {tuple(at) for at in offsets[:99]}}))
    compare = MetadataIndex.__eq__

    def counted(one: MetadataIndex, other: object) -> bool:
        nonlocal compared
        compared += 1
        return bool(compare(one, other))

    monkeypatch.setattr(MetadataIndex, "__eq__", counted)
    for raw in (written, pickled_by_torch, in_sets):
        for vocabulary in (VOCABULARY, BY_OPCODES):
            refused = outcome(raw, vocabulary)
            assert refused == (pickled.Malformed, "more than 64 keys of a table have the same hash")
    assert compared < len(offsets)
