"""The coordinator's planning and the writing of `.metadata` say the same as torch's own. perf/coordinator.py shows
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

from tunetool.checkpoint import column_plan, metadata, planner
from tunetool.checkpoint.columns import PackedTable, columns_of
from tunetool.checkpoint.global_plan import check, describe, item_bytes, merged, pieces, share_out
from tunetool.checkpoint.holders import holds
from tunetool.checkpoint.metadata_pickle import Described
from tunetool.checkpoint.packed import Locations, Packed, PackedItems, PackedStored, Results
from tunetool.checkpoint.planner import DirectSavePlanner
from tunetool.checkpoint.tensor_table import TensorTable
from tunetool.checkpoint.torch_call import TorchCall

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
    loads, shares, shared, replicated = [0] * len(plans), [[] for _ in plans], [[] for _ in plans], []
    for index, item in items.items():
        for piece in pieces(item, split_above):
            if len(holders[index]) > 1:
                replicated.append((piece, holders[index]))
            else:
                shares[holders[index][0]].append(piece)
                loads[holders[index][0]] += item_bytes(piece)
    for piece, ranks in sorted(replicated, key=lambda entry: -item_bytes(entry[0])):
        rank = min(ranks, key=lambda rank: (loads[rank], rank))
        shared[rank].append((piece, ranks))
        loads[rank] += item_bytes(piece)
    met = [ranks for _, ranks in replicated]
    return [
        [*own, *(piece for piece, _ in sorted(theirs, key=lambda entry: met.index(entry[1])))]
        for own, theirs in zip(shares, shared, strict=True)
    ]


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
    shares = share_out(plans, split_above)
    assert [share.items for share in shares] == simply(plans, split_above)
    for rank, share in enumerate(shares):
        numbers, ranks = share.groups.by_item()
        for item, number in zip(share.items, numbers, strict=True):
            # A piece has another offset than the item of which it is cut.
            others = {other for other, plan in enumerate(plans) if item.index.fqn in {i.index.fqn for i in plan.items}}
            assert others <= {rank} if not ranks[number] else all(holds(ranks[number], [other]) for other in others)


def test_small_items_of_many_ranks_lie_on_the_first_few() -> None:
    """So a node takes what it needs of an optimizer's counters from one other node, not from all."""
    small = [shard(f"step{number}", (0,), (1,), (1,)) for number in range(100)]
    large = [shard(f"norm{number}", (0,), (1 << 16,), (1 << 16,)) for number in range(40)]
    plans = [SavePlan([*small, *large, shard("own", (rank,), (1,), (20,))]) for rank in range(20)]
    shares = share_out(plans, 1 << 30)
    writers = {item.index.fqn: rank for rank, share in enumerate(shares) for item in share.items}
    assert {writers[item.index.fqn] for item in small} <= set(range(8))
    assert {writers[item.index.fqn] for item in large} == set(range(20))
    columns = [pickle.loads(pickle.dumps(PackedItems(plan.items))).known_columns for plan in plans]
    found = column_plan.plan(columns, 1 << 30)
    assert found is not None
    assert found[2] == [share.groups for share in shares]


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


def test_the_bytes_of_an_earlier_save_get_the_names_of_this_one() -> None:
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


SIZES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def plans_of_any_kind(draw: Any) -> list[SavePlan]:
    """Tensors in grids of chunks, whole ones and objects, each held by some ranks; rarely with something wrong."""
    ranks = draw(st.integers(1, 5))
    plans: list[list[WriteItem]] = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(0, 8))):
        name, size = f"t{number}", draw(SIZES)
        properties = TensorProperties(draw(st.sampled_from(DTYPES)), requires_grad=draw(st.booleans()))
        kind = draw(st.sampled_from(["grid", "grid", "whole", "object"]))
        boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
        for length in size:
            ends = [0, *sorted(draw(st.lists(st.integers(0, length), max_size=3)) if kind == "grid" else []), length]
            spans = [(low, high - low) for low, high in itertools.pairwise(ends)]
            boxes = [((*at, low), (*long, count)) for at, long in boxes for low, count in spans]
        if draw(st.integers(0, 19)) == 19:
            boxes.append(boxes[draw(st.integers(0, len(boxes) - 1))])
        if draw(st.integers(0, 19)) == 19:
            boxes[0] = boxes[0][0], tuple(length + 1 for length in boxes[0][1])
        for at, long in boxes:
            chunk = ChunkStorageMetadata(torch.Size(at), torch.Size(long))
            data = TensorWriteData(chunk, properties, torch.Size(size))
            its = WriteItemType.SHARD if kind == "grid" else WriteItemType.TENSOR
            item = WriteItem(MetadataIndex(name, at), its, tensor_data=data)
            if kind == "object":
                item = WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=draw(st.sampled_from([1, 5])))):
                plans[rank].append(item)
    return [SavePlan(items) for items in plans]


def with_hints(items: Any) -> list[tuple[WriteItem, int | None]]:
    """torch compares no hints."""
    return [(item, item.index.index) for item in items]


def lies_within(data: TensorWriteData | None) -> bool:
    if data is None:
        return True
    bounds = zip(data.chunk.offsets, data.chunk.sizes, data.size, strict=True)
    return all(at >= 0 and at + size <= end for at, size, end in bounds)


@settings(max_examples=400)
@given(plans=plans_of_any_kind(), split_above=st.integers(1, 500))
def test_columns_are_planned_as_objects_are(plans: list[SavePlan], split_above: int) -> None:
    columns = [pickle.loads(pickle.dumps(PackedItems(plan.items))).known_columns for plan in plans]
    assert all(each is not None for each in columns)
    try:
        answers, described = describe(share_out(plans, split_above))
        check(answers, described)
    except (AssertionError, ValueError) as error:
        try:
            assert column_plan.plan(columns, split_above) is None
        except type(error) as raised:
            assert str(raised)[:30] == str(error)[:30]  # noqa: PT017  (either is right)
        return
    found = column_plan.plan(columns, split_above)
    if found is None:
        # Another rank's chunk at the same place leads out of the tensor: only the first one is saved.
        assert not all(map(lies_within, (item.tensor_data for plan in plans for item in plan.items)))
        return
    assert [with_hints(each.items()) for each in found[0]] == [with_hints(plan.items) for plan in answers]
    assert found[2] == [plan.groups for plan in answers]
    assert found[1] == described.state_dict_metadata


def test_many_chunks_are_checked_as_few_are() -> None:
    """In numbers that numpy checks."""
    rows = [shard("t", (2 * row, column), (2, 1), (200, 3)) for row in range(100) for column in range(3)]
    found = column_plan.plan([columns_of(rows[:150]), columns_of(rows[150:])], 1 << 30)
    assert found is not None
    assert found[1]["t"].chunks == [item.tensor_data.chunk for item in rows]
    empty = shard("t", (200, 0), (0, 3), (200, 3))
    assert column_plan.plan([columns_of([*rows, empty]), columns_of([])], 1 << 30) is not None
    for wrong in (rows[1:], [*rows[1:], shard("t", (1, 0), (2, 1), (200, 3))]):
        with pytest.raises(ValueError, match="Failed to validate global plan"):
            column_plan.plan([columns_of(wrong), columns_of([])], 1 << 30)


@pytest.mark.parametrize(
    "item",
    [
        dataclasses.replace(shard("t", (0, 0), (2, 2), (4, 4)), index=MetadataIndex("t", [1, 0])),
        dataclasses.replace(shard("t", (0,), (2,), (4,)), index=MetadataIndex("t")),
        WriteItem(MetadataIndex("t", [0]), WriteItemType.BYTE_IO),
        shard("t", (1 << 63,), (2,), (4,)),
    ],
)
def test_items_that_columns_cannot_say_travel_as_objects(item: WriteItem) -> None:
    assert columns_of([item]) is None
    assert pickle.loads(pickle.dumps(PackedItems([item]))) == [item]


def arrived(plans: list[list[WriteItem]]) -> list[SavePlan]:
    """The plans as the coordinator gets them."""
    sent = [
        SavePlan(PackedItems(items), planner_data=PackedTable({item.index.fqn: ("model", item.index.fqn)}))
        for items in plans
        for item in items[:1]
    ]
    return [pickle.loads(pickle.dumps(plan)) for plan in sent]


def of_ranks(ranks: int, tensors: int) -> list[list[WriteItem]]:
    objects = [[WriteItem(MetadataIndex("step"), WriteItemType.BYTE_IO)], *([[]] * (ranks - 1))]
    return [
        [shard(f"t{number}", (70_000 * rank, 0), (70_000, 4), (70_000 * ranks, 4)) for number in range(tensors)]
        + objects[rank]
        for rank in range(ranks)
    ]


def saved_by_columns(ranks: int, tensors: int) -> tuple[Metadata, list[Results]]:
    planner.forget_plans()
    answers, described = DirectSavePlanner().create_global_plan(arrived(of_ranks(ranks, tensors)))
    results = []
    for rank, plan in enumerate(answers):
        items = pickle.loads(pickle.dumps(plan.items))
        count = range(len(items))
        stored = PackedStored.of(
            items, [at % 3 for at in count], [at << 33 for at in count], [at + 300 for at in count]
        )
        results.append(pickle.loads(pickle.dumps(Results(stored, tuple(f"__{rank}_{file}" for file in range(3))))))
    return described, results


@pytest.mark.parametrize("tensors", [3, 700])
def test_metadata_written_from_columns_is_read_as_it_was(tensors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    described, results = saved_by_columns(3, tensors)
    with monkeypatch.context() as patched:
        patched.setattr(metadata, "dumps", lambda *_: pytest.fail("Python's pickler is asked"))
        patched.setattr(Described, "stored", lambda *_: pytest.fail("objects are made"))
        content = b"".join(metadata.content_of(described, results, PLACE))
    stored = {index: info for rank in results for index, info in rank.infos()}
    expected = dataclasses.replace(
        described, storage_data=stored, state_dict_metadata=dict(described.state_dict_metadata)
    )
    assert len(stored) == 3 * tensors + 1
    for found in (pickle.loads(content), metadata.loads(content, PLACE)):
        assert found == expected
        assert {index: index.index for index in found.storage_data} == {index: index.index for index in stored}
    assert {index.index for index in stored} == {0, 1, 2, None}


def test_ranks_of_equal_structure_share_it() -> None:
    plans = arrived(of_ranks(4, 9))
    assert len({id(plan.items.known_columns.structure) for plan in plans[1:]}) == 1
    assert len({id(plan.planner_data) for plan in plans}) == 1


def test_plans_that_arrive_again_are_answered_by_the_same() -> None:
    planner.forget_plans()
    first, _ = DirectSavePlanner().create_global_plan(arrived(of_ranks(3, 5)))
    again, described = DirectSavePlanner().create_global_plan(arrived(of_ranks(3, 5)))
    assert all(one.items is other.items for one, other in zip(first, again, strict=True))
    described.state_dict_metadata["t0"].chunks.clear()
    del described.state_dict_metadata["t1"]
    _, once_more = DirectSavePlanner().create_global_plan(arrived(of_ranks(3, 5)))
    assert [len(each.chunks) for name, each in once_more.state_dict_metadata.items() if name != "step"] == [3] * 5
    moved = of_ranks(3, 5)
    moved[1], moved[2] = moved[2], moved[1]
    other, _ = DirectSavePlanner().create_global_plan(arrived(moved))
    assert other[1].items[0].index.offset == (140_000, 0)


def test_a_changed_table_is_written_with_the_change() -> None:
    described, results = saved_by_columns(2, 2)
    described.state_dict_metadata["t0"].properties.requires_grad = True
    described.state_dict_metadata["new"] = BytesStorageMetadata()
    found = metadata.loads(
        b"".join(metadata.content_of(described, results, PLACE, planner.kept_bytes(described))), PLACE
    )
    assert found.state_dict_metadata["t0"].properties.requires_grad
    assert list(found.state_dict_metadata) == ["t0", "t1", "step", "new"]


def test_what_torch_sends_is_small_and_what_others_pickle_plain() -> None:
    described, results = saved_by_columns(4, 500)
    tables = described.state_dict_metadata
    assert type(pickle.loads(pickle.dumps(tables))) is dict
    assert type(pickle.loads(pickle.dumps(Locations(results)))) is dict
    call = TorchCall(recorded=True)
    both = tables.fresh(call), Locations(results, call)
    travelling = pickle.dumps(both)
    got, where = pickle.loads(travelling)
    assert isinstance(got, TensorTable)
    assert isinstance(where, Locations)
    assert len(travelling) < len(pickle.dumps((dict(tables), dict(Locations(results))))) / 2
    assert got == dict(tables)
    assert where == dict(Locations(results))
    call.end()
    for each in (*both, got, where):
        assert type(pickle.loads(pickle.dumps(each))) is dict
