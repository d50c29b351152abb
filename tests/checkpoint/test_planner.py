"""How DirectSavePlanner distributes the writing, on plans made by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import _validate_global_plan, create_default_global_save_plan
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_write_items

from tunetool.checkpoint.global_plan import item_bytes, pieces, share_out
from tunetool.checkpoint.planner import DirectSavePlanner


def write_item(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> WriteItem:
    item: WriteItem = _create_write_items(name, torch.empty(shape, dtype=dtype, device="meta"))[0]
    return item


@given(
    shape=st.lists(st.integers(0, 100), max_size=3).map(tuple),
    limit=st.integers(1000, 10**6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.bool]),
)
def test_a_tensor_is_cut_into_rows_that_make_it_up(shape: tuple[int, ...], limit: int, dtype: torch.dtype) -> None:
    item = write_item("x", shape, dtype)
    cut = pieces(item, limit)
    assert sum(map(item_bytes, cut)) == item_bytes(item)
    row = item_bytes(item) // shape[0] if shape and shape[0] else 0
    for part in cut:
        assert item_bytes(part) <= max(limit, row) or len(cut) == 1
        assert part.index.offset == part.tensor_data.chunk.offsets
        assert part.tensor_data.chunk.sizes[1:] == item.tensor_data.chunk.sizes[1:]
    if item_bytes(item) <= limit:
        assert cut == [item]
    plans, metadata = create_default_global_save_plan([SavePlan(cut), SavePlan([])])
    assert _validate_global_plan(plans, metadata) == []
    assert metadata.state_dict_metadata["x"].size == torch.Size(shape)


@settings(max_examples=50)
@given(
    replicated=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 2000)), max_size=40),
    alone=st.lists(st.integers(1, 200), min_size=3, max_size=3),
)
def test_replicas_are_written_once_and_even_out_the_rest(replicated: list[tuple[int, int]], alone: list[int]) -> None:
    shared = [write_item(f"r{number}", shape) for number, shape in enumerate(replicated)]
    plans = [SavePlan([*shared, write_item(f"own{rank}", (rows, 100))]) for rank, rows in enumerate(alone)]
    limit = 40_000
    shares = share_out(plans, limit)
    assert shares == share_out(plans, limit)
    where = {}
    for rank, share in enumerate(shares):
        for item in share.items:
            assert item.index not in where
            where[item.index] = rank
            assert item.index.fqn in {f"own{rank}", *(f"r{n}" for n in range(len(replicated)))}
    total = sum(item_bytes(item) for share in shares for item in share.items)
    assert total == sum(map(item_bytes, shared)) + sum(rows * 400 for rows in alone)
    loads = [sum(map(item_bytes, share.items)) for share in shares]
    largest = max((item_bytes(p) for item in shared for p in pieces(item, limit)), default=0)
    assert max(loads) <= max(*(rows * 400 for rows in alone), math.ceil(total / 3) + largest)


def test_objects_are_written_by_one_rank() -> None:
    plan = SavePlan(_create_write_items("step", 5))
    assert [len(share.items) for share in share_out([plan, plan], 100)] == [1, 0]


def test_a_limit_that_is_no_size_is_refused() -> None:
    with pytest.raises(ValueError, match="split_above"):
        DirectSavePlanner(split_above=0)
