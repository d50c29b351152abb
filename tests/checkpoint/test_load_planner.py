"""DirectLoadPlanner makes torch's plan, and the same errors, of any state and checkpoint."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest
import seeded
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from tunetool.checkpoint import DirectLoadPlanner, DirectReader, DirectSavePlanner, DirectWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SHAPES = [(), (3,), (0,), (2, 3), (4, 0), (1, 2, 3)]
values = st.one_of(
    st.sampled_from(SHAPES).map(torch.zeros),
    st.sampled_from(SHAPES).map(lambda shape: torch.nn.Parameter(torch.zeros(shape))),
    st.sampled_from([5, 0.5, None, "text", b"bytes", (1, 2), True]),
)
names = st.sampled_from(["a", "b", "a.b", "c", 0, "0", 1, "1", True])
states = st.dictionaries(
    names,
    st.recursive(
        values,
        lambda inner: st.one_of(
            st.dictionaries(names, inner, max_size=3),
            st.dictionaries(names, inner, max_size=3).map(collections.OrderedDict),
            st.lists(inner, max_size=2),
        ),
        max_leaves=4,
    ),
    max_size=4,
)


def planned(planner: Any, state: Any, described: Metadata | None) -> Any:
    """All that a reader gets of the planner, or its error."""
    try:
        planner.set_up_planner(state, described, is_coordinator=True)
        plan = planner.create_local_plan()
    except Exception as error:
        return type(error), str(error)
    items = [(item, vars(item.dest_index), vars(item.storage_index)) for item in plan.items]
    leaves = [
        (name, id(value) if isinstance(value, torch.Tensor) else repr(value))
        for name, value in planner.state_dict.items()
    ]
    whole = id(planner.original_state_dict), planner.mappings, planner.metadata is described, planner.is_coordinator
    return plan, items, leaves, whole


def is_planned_as_by_torch(state: Any, described: Metadata | None, **settings: Any) -> None:
    expected = planned(dcp.DefaultLoadPlanner(**settings), state, described)
    assert planned(DirectLoadPlanner(**settings), state, described) == expected


def chunks_of(shape: tuple[int, ...], kind: str) -> list[ChunkStorageMetadata]:
    """Of a tensor that was saved whole, cut in two, or not as it should be."""
    first = torch.Size([0] * len(shape))
    if kind == "none":
        return []
    if kind == "part" and shape:
        return [ChunkStorageMetadata(torch.Size([1, *first[1:]]), torch.Size([max(0, shape[0] - 1), *shape[1:]]))]
    if kind == "cut" and shape and shape[0] > 1:
        return [
            ChunkStorageMetadata(first, torch.Size([1, *shape[1:]])),
            ChunkStorageMetadata(torch.Size([1, *first[1:]]), torch.Size([shape[0] - 1, *shape[1:]])),
        ]
    return [ChunkStorageMetadata(first, torch.Size(shape))]


@given(
    state=states,
    data=st.data(),
    flatten=st.booleans(),
    partly=st.booleans(),
)
def test_the_plan_of_any_state_is_torchs(state: Any, data: st.DataObject, flatten: bool, partly: bool) -> None:
    leaves = dcp.DefaultLoadPlanner(flatten_state_dict=flatten)
    try:
        leaves.set_up_planner(state, None)
    except Exception:
        leaves.state_dict = {}
    tables: dict[str, Any] = {}
    for name, value in leaves.state_dict.items():
        kind = data.draw(st.sampled_from(["whole", "whole", "cut", "part", "none", "other", "object", "lost"]))
        if kind == "lost":
            continue
        shape = tuple(getattr(value, "shape", ()))
        if kind == "object" or (kind != "other" and not isinstance(value, torch.Tensor)):
            tables[name] = BytesStorageMetadata()
            continue
        shape = (*shape, 2) if kind == "other" else shape
        tables[name] = TensorStorageMetadata(TensorProperties(), torch.Size(shape), chunks_of(shape, kind))
    if data.draw(st.booleans()):
        tables["only in the checkpoint"] = BytesStorageMetadata()
    is_planned_as_by_torch(state, Metadata(tables), flatten_state_dict=flatten, allow_partial_load=partly)


def test_values_that_torch_refuses_or_replaces_are_left_to_it() -> None:
    for state in ({"t": torch.zeros(2, device="meta")}, {"dtype": torch.float32}, {"a.b": 1, "a": {"b": 2}}, {"e": {}}):
        is_planned_as_by_torch(state, Metadata({}))
    is_planned_as_by_torch({"t": torch.zeros(2)}, None)


def test_shards_are_planned_as_by_torch(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    state = {
        "shards": distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)]),
        "copies": distribute_tensor(torch.zeros(4, 6), mesh, [Replicate()]),
        "plain": torch.zeros(4, 6),
    }
    for kind in ("whole", "cut"):
        its = TensorStorageMetadata(TensorProperties(), torch.Size((4, 6)), chunks_of((4, 6), kind))
        is_planned_as_by_torch(state, Metadata(dict.fromkeys(state, its)))


@pytest.mark.parametrize("reader", [DirectReader, dcp.FileSystemReader])
def test_any_reader_takes_the_plan(reader: Any, tmp_path: Path) -> None:
    expected = seeded.state(1, 2)
    dcp.save(expected, storage_writer=DirectWriter(tmp_path / "a"), planner=DirectSavePlanner(split_above=1 << 18))
    target = seeded.blank(expected)
    dcp.load(target, storage_reader=reader(tmp_path / "a"), planner=DirectLoadPlanner())
    assert seeded.difference(expected, target) is None


def test_a_tensor_of_which_a_part_was_saved_is_refused(tmp_path: Path) -> None:
    dcp.save({"cut": torch.ones(8)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    described = dcp.FileSystemReader(tmp_path).read_metadata()
    described.state_dict_metadata["cut"].chunks[0].sizes = torch.Size([7])

    class Reader(DirectReader):
        def read_metadata(self, *_: Any, **__: Any) -> Metadata:
            return described

    with pytest.raises(dcp.CheckpointException, match="`cut` would not be filled"):
        dcp.load({"cut": torch.zeros(8)}, storage_reader=Reader(tmp_path), planner=DirectLoadPlanner())


@pytest.mark.parametrize("planner", [DefaultLoadPlanner, DirectLoadPlanner])
@pytest.mark.parametrize("rows", [[(0, 4), (4, 8)], [(0, 8)], [(4, 8), (0, 4)]], ids=str)
@pytest.mark.usefixtures("one_rank")
def test_a_local_tensor_may_have_chunks_of_its_own(planner: Any, rows: list[tuple[int, int]], tmp_path: Path) -> None:
    """Two DTensors whose placements are equal, and of which a rank holds other rows."""
    expected = {"a": torch.rand(8, 4), "b": torch.rand(8, 4)}
    dcp.save(expected, storage_writer=dcp.FileSystemWriter(tmp_path))
    mesh = init_device_mesh("cpu", (1,))
    held = {"a": [torch.zeros(4, 4)], "b": [torch.zeros(stop - start, 4) for start, stop in rows]}
    begins = {"a": [0], "b": [start for start, _ in rows]}
    state = {
        name: DTensor.from_local(
            LocalShardsWrapper(held[name], [(begin, 0) for begin in begins[name]]),
            mesh,
            [Replicate()],
            run_check=False,
            shape=torch.Size([8, 4]),
            stride=(4, 1),
        )
        for name in expected
    }
    dcp.load(state, storage_reader=DirectReader(tmp_path), planner=planner())
    for name, shards in held.items():
        for begin, shard in zip(begins[name], shards, strict=True):
            assert torch.equal(shard, expected[name][begin : begin + len(shard)]), name


def test_a_step_that_one_planner_replaces_is_asked(tmp_path: Path) -> None:
    dcp.save({"tensor": torch.arange(4.0)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    given, other, planner = torch.zeros(4), torch.zeros(4), DirectLoadPlanner()
    planner.resolve_tensor = lambda item: other  # type: ignore[method-assign]
    dcp.load({"tensor": given}, storage_reader=DirectReader(tmp_path), planner=planner)
    assert (given.tolist(), other.tolist()) == ([0.0] * 4, [0.0, 1.0, 2.0, 3.0])


@pytest.mark.parametrize("planner", [DefaultLoadPlanner, DirectLoadPlanner])
@pytest.mark.usefixtures("one_rank")
def test_bytes_after_a_tensor_are_never_read_as_its_own(planner: Any, tmp_path: Path) -> None:
    """Two chunks at one offset: the file holds the shorter one."""
    dcp.save({"tensor": torch.arange(4.0), "next": torch.rand(9)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    described = dcp.FileSystemReader(tmp_path).read_metadata()
    its = described.state_dict_metadata["tensor"]
    its.size, its.chunks = torch.Size([8]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([n])) for n in (8, 4)]

    class Reader(DirectReader):
        def read_metadata(self, *_: Any, **__: Any) -> Metadata:
            return described

    shard = LocalShardsWrapper([torch.zeros(4)], [(4,)])
    mesh = init_device_mesh("cpu", (1,))
    whole = DTensor.from_local(shard, mesh, [Replicate()], run_check=False, shape=torch.Size([8]), stride=(1,))
    with pytest.raises(dcp.CheckpointException, match=r"holds `tensor` with shape \[4\], and \[4\] from \[4\] on"):
        dcp.load({"tensor": whole}, storage_reader=Reader(tmp_path), planner=planner())
