"""The coordinator's part of planning, linear in items: which rank writes what, the table of tensors, and its check.

torch's own functions do the same with several passes over sets of all items, and compare chunks pairwise where their
version is old (pytorch#163548).
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from tunetool.checkpoint.holders import EVERY, ByItem, Groups, HolderSets
from tunetool.checkpoint.packed import PackedItems

_LONGEST_MESSAGE = 500
_SMALL, _FEW = 64 << 10, 8
"""Bytes, and as many ranks as most nodes have."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk."""


@dataclasses.dataclass(frozen=True)
class GroupedPlan(SavePlan):
    """A rank's plan that says who else holds its items. Every writer takes it for torch's own."""

    groups: Groups | None = None


def item_bytes(item: WriteItem) -> int:
    """Bytes of the item's chunk; 1 for an object, whose size is unknown until it is pickled."""
    data = item.tensor_data
    return 1 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def pieces(item: WriteItem, split_above: int) -> list[WriteItem]:
    """The item cut along dimension 0 into parts of nearly equal size, none larger than ``split_above`` bytes unless a
    single row is; the item itself if it need not be cut."""
    data, size = item.tensor_data, item_bytes(item)
    if data is None or size <= split_above or not data.chunk.sizes or data.chunk.sizes[0] < 2:
        return [item]
    rows = data.chunk.sizes[0]
    count = -(-rows // max(1, split_above * rows // size))
    bounds = [rows * part // count for part in range(count + 1)]
    return [_part(item, data, first, last) for first, last in itertools.pairwise(bounds)]


def _part(item: WriteItem, data: TensorWriteData, first: int, last: int) -> WriteItem:
    offsets = torch.Size((data.chunk.offsets[0] + first, *data.chunk.offsets[1:]))
    chunk = ChunkStorageMetadata(offsets, torch.Size((last - first, *data.chunk.sizes[1:])))
    # A TENSOR must be the only item of its name; a SHARD has the same metadata and may be one of several.
    return WriteItem(
        index=MetadataIndex(item.index.fqn, offsets),
        type=WriteItemType.SHARD,
        tensor_data=dataclasses.replace(data, chunk=chunk),
    )


def share_out(plans: Sequence[SavePlan], split_above: int) -> list[GroupedPlan]:
    """Assign every item to one rank: an item that only one rank holds stays there; then the replicated pieces, the
    largest first, each go to the rank with the fewest bytes among those that hold it (the lowest of equals), small ones
    among the first few of these. Replicated pieces follow a rank's own, by who holds them."""
    held: dict[tuple[str, Any], tuple[WriteItem, list[int]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            index = item.index
            # What torch's index is compared by; its own hash is a slow call into Python.
            key = index.fqn, index.offset
            entry = held.get(key)
            if entry is None:
                held[key] = item, [rank]
            elif entry[1][-1] != rank:
                entry[1].append(rank)
    loads = [0] * len(plans)
    shares: list[list[WriteItem]] = [[] for _ in plans]
    shared: list[list[tuple[int, WriteItem]]] = [[] for _ in plans]
    replicated: list[tuple[int, WriteItem, tuple[int, ...], int]] = []
    sets = HolderSets()
    for item, ranks in held.values():
        size = item_bytes(item)
        cut = (
            [(item, size)] if size <= split_above else [(each, item_bytes(each)) for each in pieces(item, split_above)]
        )
        if len(ranks) > 1:
            holders = tuple(ranks)
            number = sets.number(holders)
            replicated += [(size, piece, takers(holders, size), number) for piece, size in cut]
        else:
            for piece, size in cut:
                shares[ranks[0]].append(piece)
                loads[ranks[0]] += size
    lightest = Lightest(loads)
    for size, piece, able, number in sorted(replicated, key=lambda entry: -entry[0]):
        rank = lightest.of(able)
        shared[rank].append((number, piece))
        loads[rank] += size
    answers = []
    for plan, own, theirs in zip(plans, shares, shared, strict=True):
        theirs.sort(key=lambda entry: entry[0])
        groups = sets.groups(len(own), (number for number, _ in theirs))
        answers.append(with_groups(plan, [*own, *(piece for _, piece in theirs)], groups))
    return answers


def takers(holders: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Those of an item's holders that may write it. The many small items of an optimizer, which every rank needs, then
    lie on one node, and not on all."""
    return holders[:_FEW] if size <= _SMALL else holders


def with_groups(plan: SavePlan, items: Any, groups: Groups | None) -> GroupedPlan:
    """The plan with these items, and their groups."""
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(SavePlan)}
    return GroupedPlan(**{**fields, "items": items, "groups": groups})


def held_together(plans: Iterable[SavePlan]) -> list[str]:
    """The names of the items that several ranks hold."""
    names: set[str] = set()
    for plan in plans:
        groups = plan.groups if isinstance(plan, GroupedPlan) else None
        if groups is not None and sum(groups.counts) > groups.counts[0]:
            columns = plan.items.known_columns if isinstance(plan.items, PackedItems) else None
            every = columns.structure.names if columns else [item.index.fqn for item in plan.items]
            names.update(every[groups.counts[0] :])
    return sorted(names)


def by_wholeness(items: Sequence[WriteItem]) -> ByItem:
    """Groups where nobody knows who holds what: every rank may need an object, and a tensor that one item is."""
    whole = [item.tensor_data is None or item.tensor_data.chunk.sizes == item.tensor_data.size for item in items]
    return ByItem([*map(int, whole)], ("", EVERY))


class Lightest:
    """The rank with the fewest bytes of some ranks. ``loads`` only grow meanwhile."""

    def __init__(self, loads: list[int]) -> None:
        self._loads = loads
        self._heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def of(self, ranks: tuple[int, ...]) -> int:
        loads = self._loads
        heap = self._heaps.get(ranks)
        if heap is None:
            heap = self._heaps[ranks] = [(loads[rank], rank) for rank in ranks]
            heapq.heapify(heap)
        while heap[0][0] != loads[heap[0][1]]:
            heapq.heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
        return heap[0][1]


def describe(plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """The plans with the number of each chunk within its tensor, and the table of tensors, as torch's
    ``create_default_global_save_plan`` makes them. Every item is in one plan only."""
    tensors: dict[str, Any] = {}
    described: list[SavePlan] = []
    for plan in plans:
        items = []
        for item in plan.items:
            name, data = item.index.fqn, item.tensor_data
            known = tensors.get(name)
            if known is not None and item.type != WriteItemType.SHARD:
                raise AssertionError(f"`{name}` is planned twice")
            if item.type == WriteItemType.BYTE_IO:
                tensors[name] = BytesStorageMetadata()
                items.append(item)
                continue
            if data is None or data.chunk is None:
                raise AssertionError(f"`{name}` has no bounds")
            if known is None:
                known = tensors[name] = TensorStorageMetadata(data.properties, data.size, [])
            items.append(renamed(item, index=len(known.chunks)))
            known.chunks.append(data.chunk)
        described.append(dataclasses.replace(plan, items=items))
    return described, Metadata(tensors)


def renamed(item: WriteItem, **index: Any) -> WriteItem:
    """The item with another ``index``: that of itself but for these fields."""
    # `dataclasses.replace` takes five times as long, and there are as many items as ranks times tensors.
    named = object.__new__(MetadataIndex)
    named.__dict__.update(item.index.__dict__, **index)
    other = object.__new__(WriteItem)
    other.__dict__.update(item.__dict__, index=named)
    return other


def merged(mappings: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The ranks' tables of where each name comes from in the state, as one. The first rank that has a name decides."""
    together: dict[str, Any] = {}
    # Ranks with equal tables share the object.
    distinct = {id(mapping): mapping for mapping in mappings}
    for mapping in reversed(distinct.values()):
        together.update(mapping)
    return together


def check(plans: Sequence[SavePlan], metadata: Metadata) -> None:
    """Raises ``ValueError`` unless the chunks of every tensor lie within it and do not overlap, and, with several
    ranks, fill it: torch's ``_validate_global_plan``, which is asked only for chunks that form no grid."""
    for name, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, BytesStorageMetadata) or not len(tensor.size):
            continue
        if len(tensor.chunks) == 1 and tensor.chunks[0].sizes == tensor.size and not any(tensor.chunks[0].offsets):
            continue
        if is_grid(tensor.size, [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks]):
            continue
        problems: Any = default_planner._validate_global_plan(list(plans), Metadata({name: tensor}))
        # torch 2.5 to 2.7 answers with a truth value, and writes why to its log.
        if problems is False:
            raise ValueError("Failed to validate global plan")
        if problems and problems is not True:
            told = "; ".join(problems)
            raise ValueError(
                "Failed to validate global plan: "
                + (told if len(told) <= _LONGEST_MESSAGE else f"{told[:_LONGEST_MESSAGE]}... (truncated)")
            )


def is_grid(size: torch.Size, chunks: Sequence[Box]) -> bool:
    """Whether the chunks are the cells of a grid that fills the tensor. Empty chunks within its bounds count for
    nothing: the shards of ranks for which no row is left."""
    if len(chunks) == 1:
        return bool(tuple(chunks[0][1]) == tuple(size) and not any(chunks[0][0]))
    cells = 1
    filled = [(offsets, sizes) for offsets, sizes in chunks if 0 not in sizes]
    if len(filled) < len(chunks):
        for offsets, sizes in chunks:
            if any(at < 0 or at + long > end for at, long, end in zip(offsets, sizes, size, strict=True)):
                return False
    for dimension, length in enumerate(size):
        stop = 0
        # Of made-up tuples thousands can have the same hash, and each would be compared with all the others; of numbers
        # below 2^63 only four.
        ranges = {offsets[dimension]: sizes[dimension] for offsets, sizes in filled}
        if any(ranges[offsets[dimension]] != sizes[dimension] for offsets, sizes in filled):
            return False
        for start, long in sorted(ranges.items()):
            if start != stop:
                return False
            stop += long
        if stop != length:
            return False
        cells *= len(ranges)
    return cells == len(filled) == len({hash(offsets) for offsets, _ in filled})
