"""The coordinator's planning and the writing of `.metadata` say the same as torch's own. perf/checkpoint_ranks.py shows
that they are linear."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import _validate_global_plan, create_default_global_save_plan
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
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from tunetool.checkpoint import metadata
from tunetool.checkpoint.global_plan import check, describe, item_bytes, merged, pieces, share_out
from tunetool.checkpoint.metadata_pickle import Described
from tunetool.checkpoint.packed import Packed, Results

PLACE = Path("step-1/.metadata")


def shard(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], whole: tuple[int, ...]) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size(whole))
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def simply(plans: list[SavePlan], split_above: int) -> list[list[WriteItem]]:
    """``share_out`` as one would write it down, with a look at every rank for every piece."""
    holders, items = defaultdict(list), {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            items.setdefault(item.index, item)
            if rank not in holders[item.index]:
                holders[item.index].append(rank)
    loads, shares, replicated = [0] * len(plans), [[] for _ in plans], []
    for index, item in items.items():
        for piece in pieces(item, split_above):
            if len(holders[index]) > 1:
                replicated.append((piece, holders[index]))
            else:
                shares[holders[index][0]].append(piece)
                loads[holders[index][0]] += item_bytes(piece)
    for piece, ranks in sorted(replicated, key=lambda entry: -item_bytes(entry[0])):
        rank = min(ranks, key=lambda rank: (loads[rank], rank))
        shares[rank].append(piece)
        loads[rank] += item_bytes(piece)
    return shares


@st.composite
def plans_of_ranks(draw: Any) -> list[SavePlan]:
    """Items that some of the ranks hold, in any order, each once or twice."""
    ranks = draw(st.integers(1, 5))
    plans: list[list[WriteItem]] = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(0, 12))):
        rows, columns = draw(st.integers(0, 40)), draw(st.integers(1, 40))
        item = shard(f"t{number}", (0, 0), (rows, columns), (rows, columns))
        if draw(st.booleans()):
            item = WriteItem(MetadataIndex(f"t{number}"), WriteItemType.BYTE_IO)
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            plans[rank].append(item)
            if draw(st.integers(0, 9)) == 9:
                plans[rank].append(item)
    return [SavePlan(items) for items in plans]


@given(plans=plans_of_ranks(), split_above=st.integers(1, 5000))
def test_items_are_shared_out_as_by_a_look_at_every_rank(plans: list[SavePlan], split_above: int) -> None:
    assert [share.items for share in share_out(plans, split_above)] == simply(plans, split_above)


@given(plans=plans_of_ranks(), split_above=st.integers(1, 5000))
def test_the_table_of_tensors_is_torchs(plans: list[SavePlan], split_above: int) -> None:
    shares = share_out(plans, split_above)
    ours, theirs = describe(shares), create_default_global_save_plan(shares)
    assert ours == theirs
    assert [[item.index.index for item in plan.items] for plan in ours[0]] == [
        [item.index.index for item in plan.items] for plan in theirs[0]
    ]
    check(*ours)


@st.composite
def tensors_in_chunks(draw: Any) -> TensorStorageMetadata:
    """Grids with a part that is moved, lost, doubled or of another size."""
    size = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    cuts = [sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=2))}) for length in size]
    chunks = [ChunkStorageMetadata(torch.Size(()), torch.Size(()))]
    for ends in cuts:
        spans = list(itertools.pairwise(ends)) or [(0, 0)]
        chunks = [
            ChunkStorageMetadata(torch.Size((*chunk.offsets, low)), torch.Size((*chunk.sizes, high - low)))
            for chunk in chunks
            for low, high in spans
        ]
    change = draw(st.sampled_from(["none", "none", "lose", "double", "move", "grow", "empty"]))
    pick = draw(st.integers(0, len(chunks) - 1))
    chosen = chunks[pick]
    by = [draw(st.integers(-1, 1)) for _ in size]
    moved = torch.Size(at + each for at, each in zip(chosen.offsets, by, strict=True))
    if change == "lose":
        del chunks[pick]
    elif change == "double":
        chunks.append(chosen)
    elif change == "move":
        chunks[pick] = ChunkStorageMetadata(moved, chosen.sizes)
    elif change == "grow":
        chunks[pick] = ChunkStorageMetadata(
            chosen.offsets, torch.Size(max(0, n + d) for n, d in zip(chosen.sizes, by, strict=True))
        )
    elif change == "empty":
        chunks.append(ChunkStorageMetadata(moved, torch.Size([0] * len(size))))
    return TensorStorageMetadata(TensorProperties(), torch.Size(size), draw(st.permutations(chunks)))


@settings(max_examples=400)
@given(tensor=tensors_in_chunks(), ranks=st.integers(1, 3))
def test_chunks_are_refused_where_torch_refuses_them(tensor: TensorStorageMetadata, ranks: int) -> None:
    plans, described = [SavePlan([])] * ranks, Metadata({"t": tensor})
    if _validate_global_plan(plans, described) in ([], True):
        check(plans, described)
    else:
        with pytest.raises(ValueError, match="Failed to validate global plan"):
            check(plans, described)


@given(mappings=st.lists(st.dictionaries(st.sampled_from("abcd"), st.integers()), max_size=4))
def test_the_first_rank_decides_where_a_name_comes_from(mappings: list[dict[str, int]]) -> None:
    together: dict[str, int] = {}
    for mapping in mappings:
        for name, value in mapping.items():
            together.setdefault(name, value)
    assert merged(mappings) == together


names = st.text(max_size=300)
lengths = st.one_of(st.integers(0, 300), st.integers(0, 2**62))
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.uint16]


@st.composite
def saved(draw: Any) -> tuple[Metadata, list[Results]]:
    tables: dict[str, Any] = {}
    for name in draw(st.lists(names, unique=True, max_size=5)):
        if draw(st.booleans()):
            tables[name] = BytesStorageMetadata()
            continue
        dimensions = draw(st.integers(0, 5))
        sizes = [torch.Size(draw(lengths) for _ in range(dimensions)) for _ in range(5)]
        properties = TensorProperties(draw(st.sampled_from(DTYPES)), requires_grad=draw(st.booleans()))
        chunks = [ChunkStorageMetadata(sizes[0], sizes[1]), ChunkStorageMetadata(sizes[2], sizes[3])]
        tables[name] = TensorStorageMetadata(properties, sizes[4], chunks[: draw(st.integers(0, 2))])
    results = []
    for rank in range(draw(st.integers(1, 3))):
        offsets = st.one_of(st.none(), st.lists(lengths, max_size=4))
        index = st.builds(MetadataIndex, st.sampled_from([*tables, "else"]), offsets, st.one_of(st.none(), lengths))
        stored = draw(st.lists(st.tuples(index, st.integers(0, 2), lengths, lengths), max_size=4))
        results.append(Results(Packed(stored), tuple(f"__{rank}_{number}.{'0' * 16}.distcp" for number in range(3))))
    path = st.lists(st.one_of(names, st.integers(0, 2000)), max_size=5).map(tuple)
    planner_data = draw(st.one_of(st.none(), st.dictionaries(names, path, max_size=4)))
    meta = StorageMeta(draw(st.one_of(st.none(), names)), draw(st.one_of(st.none(), st.just("0123456789abcdef"))))
    return Metadata(tables, planner_data, storage_meta=meta, version=draw(st.one_of(st.none(), names))), results


@settings(max_examples=300)
@given(saved=saved())
def test_metadata_is_read_as_it_was(saved: tuple[Metadata, list[Results]]) -> None:
    described, results = saved
    content = b"".join(metadata.content_of(described, results, PLACE))
    stored = {index: info for rank in results for index, info in rank.infos()}
    expected = dataclasses.replace(described, storage_data=stored)
    for found in (pickle.loads(content), metadata.loads(content, PLACE)):
        assert found == expected
        # Not compared by torch.
        assert {index: index.index for index in found.storage_data} == {index: index.index for index in stored}
        assert [type(each) for each in found.state_dict_metadata] == [str] * len(found.state_dict_metadata)


def test_no_python_pickler_is_asked_for_what_torch_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [shard(f"t{number}", (0, 0), (3, 4), (3, 4)) for number in range(2500)]
    plans, described = describe([SavePlan(items)])
    described.planner_data = {item.index.fqn: ("model", item.index.fqn, 3) for item in items}
    stored = [(item.index, 0, number, 5) for number, item in enumerate(plans[0].items)]
    described.storage_meta = StorageMeta("/scratch/step-1", "0123456789abcdef")
    monkeypatch.setattr(metadata, "dumps", lambda *_: pytest.fail("Python's pickler is asked"))
    content = b"".join(metadata.content_of(described, [Results(Packed(stored), ("a",))], PLACE))
    assert len(metadata.loads(content, PLACE).storage_data) == 2500


def test_the_bytes_of_an_earlier_save_are_used_with_the_names_of_this_one() -> None:
    plans, described = describe([SavePlan([shard("t", (0,), (4,), (4,))]), SavePlan([shard("u", (0,), (4,), (4,))])])
    kept: list[Described] = []
    packed = [Packed((item.index, 0, 64 * rank, 9) for item in plan.items) for rank, plan in enumerate(plans)]
    for step in ("a", "b", "c"):
        # As they come from another process: equal, and not the same objects.
        results = [pickle.loads(pickle.dumps(Results(each, (f"{step}{rank}",)))) for rank, each in enumerate(packed)]
        found = metadata.loads(b"".join(metadata.content_of(described, results, PLACE, kept)), PLACE)
        assert found.storage_data == {
            MetadataIndex("t", [0]): _StorageInfo(f"{step}0", 0, 9),
            MetadataIndex("u", [0]): _StorageInfo(f"{step}1", 64, 9),
        }
    moved = [Results(Packed([(MetadataIndex("t", [0], 0), 1, 0, 7)]), ("x", "y")), results[1]]
    found = metadata.loads(b"".join(metadata.content_of(described, moved, PLACE, kept)), PLACE)
    assert found.storage_data[MetadataIndex("t", [0])] == _StorageInfo("y", 0, 7)
    assert found.storage_data[MetadataIndex("u", [0])] == _StorageInfo("c1", 64, 9)
