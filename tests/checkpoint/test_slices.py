"""``load(..., shard=...)``: the parts that torch's placements name, and no more bytes than they need."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_loading import SMALL, bits, made, same
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tunetool.errors import UsageProblem
from tunetool.loading import Progress, ShardPlan, load
from tunetool.loading.fill import Ranks, reads_alone
from tunetool.loading.safetensors_files import list_tensors
from tunetool.loading.shard_plan import part_of_parameter
from tunetool.loading.slices import Cut, chunk, part_of
from tunetool.loading.wanted import wanted_of

MIB = 1 << 20


def by_torch(tensor: torch.Tensor, placements: Sequence[Any], ranks: Sequence[int], sizes: Sequence[int]) -> Any:
    """The part that torch's own placements cut out, from left to right."""
    for placement, rank, size in zip(placements, ranks, sizes, strict=True):
        if not isinstance(placement, Replicate):
            tensor = placement._split_tensor(tensor, size, with_padding=False)[0][rank]
    return tensor


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Any], list[int], list[int]]:
    """A shape, and a placement, a rank and a size for each of up to three dimensions of a mesh."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 8, 12, 30]), min_size=1, max_size=3)))
    dims = st.integers(-len(shape), len(shape) - 1)
    nonnegative = st.integers(0, len(shape) - 1)
    kinds = st.one_of(
        st.just(Replicate()),
        st.builds(Shard, dims),
        st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), nonnegative, st.integers(1, 4)),
    )
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    placements = [draw(kinds) for _ in sizes]
    return shape, placements, [draw(st.integers(0, size - 1)) for size in sizes], sizes


@settings(max_examples=150, deadline=None)
@given(case=placed(), seed=st.integers(0, 9))
def test_a_part_is_the_one_of_torch(case: Any, seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    shape, placements, ranks, sizes = case
    whole = made(shape, torch.bfloat16, seed)
    path = tmp_path_factory.mktemp("drawn") / "model.safetensors"
    save_file({"w": whole, "other": made((3,), torch.int8, 1)}, path)
    plan = ShardPlan({"w": placements}, ranks, sizes)
    dims = [each.dim % len(shape) for each in placements if not isinstance(each, Replicate)]
    may_be_refused = any(isinstance(each, _StridedShard) for each in placements) and len(set(dims)) < len(dims)
    try:
        ours = load(path, shard=plan, threads=1, buffer_bytes=SMALL)
    except UsageProblem:
        if not may_be_refused:
            raise
        return
    same(ours, {"w": by_torch(whole, placements, ranks, sizes).contiguous(), "other": made((3,), torch.int8, 1)})


@settings(max_examples=60, deadline=None)
@given(size=st.integers(0, 40), outer=st.integers(1, 5), inner=st.integers(1, 5))
def test_fsdp_over_tensor_parallelism_cuts_the_inner_mesh_first(size: int, outer: int, inner: int) -> None:
    """Where it is not refused, which it never is for what the ranks divide."""
    refused = 0
    for rank, other in itertools.product(range(outer), range(inner)):
        try:
            part = part_of((size,), [Cut(0, rank, outer, inner), Cut(0, other, inner)])
        except ValueError:
            refused += 1
            continue
        first, last = chunk(size, inner, other)
        begin, end = chunk(last - first, outer, rank)
        assert part.runs[0] == (((first + begin, first + end),) if begin < end else ())
    assert not refused or size % (outer * inner)


@given(size=st.integers(0, 1000), count=st.integers(1, 40))
def test_chunks_are_those_of_torch_and_cover_everything(size: int, count: int) -> None:
    chunks = [chunk(size, count, index) for index in range(count)]
    assert chunks[0][0] == 0
    assert chunks[-1][1] == size
    assert all(one[1] == two[0] for one, two in itertools.pairwise(chunks))
    if size:
        theirs = [len(each) for each in torch.arange(size).chunk(count)]
        assert [stop - start for start, stop in chunks if stop > start] == theirs


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two matrices of 8 MiB with rows of 2 KiB, and one of 4 MiB with rows of 1 MiB."""
    path = tmp_path_factory.mktemp("large") / "model.safetensors"
    tensors = {
        "a.weight": made((4096, 1024), torch.bfloat16, 1),
        "b.weight": made((4096, 1024), torch.bfloat16, 2),
        "wide.weight": made((4, MIB // 2), torch.bfloat16, 3),
    }
    save_file(tensors, path)
    return path


def _read(path: Path, plan: ShardPlan, **more: Any) -> tuple[Progress, dict[str, torch.Tensor]]:
    came: list[Progress] = []
    tensors = load(path, shard=plan, progress=came.append, **more)
    assert came[-1].bytes == came[-1].total == sum(tensor.nbytes for tensor in tensors.values())
    assert all(each.bytes <= each.total for each in came)
    return came[-1], tensors


@pytest.mark.parametrize("buffer_bytes", [SMALL, 4 * MIB])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_of_rows_only_the_slice_is_read(large: Path, size: int, buffer_bytes: int) -> None:
    for rank in range(size):
        came, tensors = _read(large, ShardPlan({"**": Shard(0)}, rank, size), buffer_bytes=buffer_bytes)
        mine = sum(tensor.nbytes for tensor in tensors.values())
        # The blocks at both ends of each slice.
        assert mine <= came.read <= mine + len(tensors) * 2 * 4096


def test_of_columns_the_rows_are_read_whole_where_they_are_short(large: Path) -> None:
    """4,096 reads of 512 bytes take longer than one of 8 MiB; a slice of 256 KiB of each row is read by itself."""
    for rank in range(4):
        came, tensors = _read(large, ShardPlan({"a": Shard(1)}, rank, 4))
        assert tensors["a.weight"].shape == (4096, 256)
        rest = sum(tensor.nbytes for name, tensor in tensors.items() if name != "a.weight")
        assert 8 * MIB - 2048 <= came.read - rest <= 8 * MIB + 4 * 2 * 4096
        came, tensors = _read(large, ShardPlan({"wide": Shard(1)}, rank, 4))
        rest = sum(tensor.nbytes for name, tensor in tensors.items() if name != "wide.weight")
        assert tensors["wide.weight"].nbytes == MIB
        # A gap of 256 KiB to the tensor before it is read too: that takes less time than another read.
        assert came.read - rest <= MIB + 4 * 2 * 4096 + MIB // 4


def test_reads_of_columns_are_large(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    really_read, sizes = os.preadv, []

    def read(handle: int, buffers: Any, offset: int, *flags: int) -> int:
        sizes.append(len(buffers[0]))
        return really_read(handle, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", read)
    load(large, shard=ShardPlan({"**": Shard(1)}, 0, 8), threads=1)
    assert len(sizes) < 20
    assert sum(sizes) <= 20 * MIB + 20 * 8192


def test_a_plan_names_tensors_modules_or_patterns(tmp_path: Path) -> None:
    names = ("model.layers.0.q_proj.weight", "model.layers.0.q_proj.bias", "model.layers.10.o_proj.weight", "q_proj.b")
    save_file(
        {name: made((8, 8), torch.float32, seed) for seed, name in enumerate(names)}, tmp_path / "model.safetensors"
    )

    def cut(placements: Any) -> set[str]:
        return {
            name for name, tensor in load(tmp_path, shard=ShardPlan(placements, 1, 2)).items() if tensor.shape != (8, 8)
        }

    assert cut({"model.layers.*.q_proj": Shard(0)}) == set(names[:2])
    assert cut({"model.layers.*.*_proj": Shard(0)}) == set(names[:3])
    assert cut({"model.layers.1*.o_proj.weight": Shard(1)}) == {names[2]}
    assert cut({"**.q_proj": [Shard(1)]}) == set(names[:2])
    assert cut({"**q_proj**": Shard(1)}) == {*names[:2], names[3]}
    # The first key that matches is taken.
    assert cut({names[0]: Replicate(), "**.q_proj": Shard(0)}) == {names[1]}
    with pytest.raises(UsageProblem, match="matches no tensor"):
        cut({"model.*.q_proj": Shard(0)})
    assert cut({}) == set()
    assert cut(lambda name, shape: Shard(len(shape) - 1) if name.endswith("bias") else None) == {names[1]}


def _named(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name.replace("_", "."): made(shape, torch.float16, 3) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("style", "weight", "bias"),
    [
        ("colwise", Shard(0), Shard(0)),
        ("colwise_rep", Shard(0), Shard(0)),
        ("colwise_gather_output", Shard(0), Shard(0)),
        ("rowwise", Shard(1), None),
        ("packed_colwise", _StridedShard(0, split_factor=2), Shard(0)),
        ("packed_rowwise", _StridedShard(1, split_factor=2), None),
        ("embedding_rowwise", Shard(0), Shard(0)),
        ("replicate", None, None),
    ],
)
def test_styles_of_transformers_are_known(style: str, weight: Any, bias: Any, tmp_path: Path) -> None:
    stored = _named(w_weight=(12, 8), w_bias=(12,))
    save_file(stored, tmp_path / "model.safetensors")
    for rank in range(2):
        ours = load(tmp_path, shard=ShardPlan({"w": style}, rank, 2))
        for name, placement in (("w.weight", weight), ("w.bias", bias)):
            theirs = stored[name] if placement is None else by_torch(stored[name], [placement], [rank], [2])
            assert bits(ours[name]) == bits(theirs), (style, name)


def test_a_mesh_says_where_this_rank_is(tmp_path: Path) -> None:
    stored = _named(w=(6, 10))
    save_file(stored, tmp_path / "model.safetensors")
    mesh = SimpleNamespace(get_coordinate=lambda: [1, 2], shape=(2, 3))
    ours = load(tmp_path, shard=ShardPlan.of_mesh({"w": (Shard(1), Shard(0))}, mesh))
    assert bits(ours["w"]) == bits(stored["w"][4:6, 5:])
    with pytest.raises(UsageProblem, match="none of its ranks"):
        ShardPlan.of_mesh({}, SimpleNamespace(get_coordinate=lambda: None, shape=(2,)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ShardPlan({}, 0, 0), "at least one rank"),
        (lambda: ShardPlan({}, 0, -1), "at least one rank"),
        (lambda: ShardPlan({}, 2, 2), "is none of 2"),
        (lambda: ShardPlan({}, -1, 2), "is none of 2"),
        (lambda: ShardPlan({}, (0, 0), 2), "2 and 1 dimensions"),
        (lambda: ShardPlan({}, (), ()), "0 and 0 dimensions"),
        (lambda: ShardPlan({}, 0.5, 2), "is no whole number"),  # type: ignore[arg-type]
        (lambda: ShardPlan([("w", Shard(0))], 0, 2), "is a list"),  # type: ignore[arg-type]
        (lambda: ShardPlan({1: Shard(0)}, 0, 2), "has the key 1"),  # type: ignore[dict-item]
        (lambda: ShardPlan({"w": Shard(0), "v": Shard(0)}, 0, 2), "`v` matches no tensor"),
        (lambda: ShardPlan({"w": Shard(2)}, 0, 2), "shape [8, 8], which has no dimension 2"),
        (lambda: ShardPlan({"w": Shard(-3)}, 0, 2), "has no dimension -3"),
        (lambda: ShardPlan({"scalar": "colwise"}, 0, 2), "has no dimension -1"),
        (lambda: ShardPlan({"w": Partial()}, 0, 2), "which is not supported"),
        (lambda: ShardPlan({"w": 0}, 0, 2), "placement `0`, which is not supported"),
        (lambda: ShardPlan({"w": "diagonal"}, 0, 2), "style `diagonal`, which is not supported"),
        (lambda: ShardPlan({"w": "colwise"}, (0, 0), (2, 2)), "on a mesh of 2 dimensions"),
        (lambda: ShardPlan({"w": Shard(0)}, (0, 0), (2, 2)), "has 1 placements, and the mesh 2"),
        (
            lambda: ShardPlan({"w": [_StridedShard(0, split_factor=3), Shard(0)]}, (0, 0), (2, 2)),
            "before other placements than FSDP2's",
        ),
    ],
)
def test_a_wrong_plan_is_named_before_anything_is_read(make: Any, words: str, tmp_path: Path) -> None:
    save_file(_named(w=(8, 8), scalar=()), tmp_path / "model.safetensors")
    with pytest.raises(UsageProblem) as caught:
        load(tmp_path, shard=make())
    assert words in caught.value.message
    assert caught.value.hint


def test_more_ranks_than_rows_leave_the_last_ones_empty(tmp_path: Path) -> None:
    save_file(_named(w=(5, 3)), tmp_path / "model.safetensors")
    shapes = [tuple(load(tmp_path, shard=ShardPlan({"w": Shard(0)}, rank, 4))["w"].shape) for rank in range(4)]
    assert shapes == [(2, 3), (2, 3), (1, 3), (0, 3)]


def test_a_group_is_refused_with_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(_named(w=(8, 8)), tmp_path / "model.safetensors")
    monkeypatch.setattr("tunetool.loading.weights._ranks", lambda *_: Ranks())
    with pytest.raises(UsageProblem, match="`group` together with `shard`"):
        load(tmp_path, shard=ShardPlan({"w": Shard(0)}, 0, 2), group=object())


def _parameter(place: list[int] | None, sizes: tuple[int, ...], held: tuple[int, ...], *placements: Any) -> Any:
    mesh = SimpleNamespace(get_coordinate=lambda: place, shape=sizes)
    return SimpleNamespace(
        shape=torch.Size((5, 4)), placements=placements, device_mesh=mesh, to_local=lambda: torch.zeros(held)
    )


def test_a_parameter_that_holds_another_shape_is_named() -> None:
    """As one that is padded, or that torch cut in an order of its own."""
    assert part_of_parameter("w", _parameter([1], (2,), (2, 4), Shard(0))).runs == (((3, 5),), ((0, 4),))
    assert part_of_parameter("w", _parameter(None, (2,), (0, 4), Shard(0))).shape == (0, 0)
    with pytest.raises(UsageProblem, match="give this rank the shape") as caught:
        part_of_parameter("w", _parameter([1], (2,), (3, 4), Shard(0)))
    assert caught.value.message.startswith("`w` is placed as [Shard(dim=0)] on a mesh of [2]: ")
    # Of 7 rows the two ranks have 4 and 3, which three ranks cut into 2, 2, 0 and 1, 1, 1: the third one's only row is
    # the second one's, and torch's placements say the first one's.
    with pytest.raises(ValueError, match="not cut evenly enough"):
        part_of((7,), [Cut(0, 2, 3, groups=2), Cut(0, 1, 2)])


def test_ranks_that_read_rows_read_past_the_page_cache(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads whole tensors, or what lies between columns, shares the page cache with the other ranks."""
    listing = list_tensors(large)

    def alone(placement: Any, of: int = 2) -> bool:
        wanted = wanted_of(listing, ShardPlan({"**": placement}, 0, of))
        targets = [torch.empty(each.shape, dtype=each.dtype) for each in wanted]
        wants = [one.wants(target) for one, target in zip(wanted, targets, strict=True)]
        return reads_alone(listing, list(itertools.chain(*wants)))

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert alone(Shard(0))
    assert not alone(Shard(1))
    assert not alone(None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert alone(Shard(0), 4)
    assert not alone(Shard(0))
