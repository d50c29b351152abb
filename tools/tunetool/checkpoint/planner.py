"""Who writes what: replicated tensors shared out over the ranks that hold them, large ones cut along dimension 0."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
from collections import defaultdict

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

SPLIT_ABOVE = 256 << 20
"""Bytes. Small enough that 8 GB share out evenly over 16 files, and still few chunks for a reader."""


class DirectSavePlanner(DefaultSavePlanner):
    """torch's planner, but what several ranks hold is shared out among them by bytes, and a tensor (or shard) of more
    than ``split_above`` bytes is saved as several chunks along dimension 0, which other ranks and files can take.

    The metadata stays torch's own: a cut tensor looks like a sharded one, so DefaultLoadPlanner with any reader loads
    it into any layout. The plan depends only on the ranks' plans. ``ValueError`` unless ``split_above`` is positive.

    ``enable_plan_caching``: as torch's planner has it: ranks whose part of the state has not changed in shape since the
    last save send no plan. ``TypeError`` where torch is too old for it.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        *,
        split_above: int = SPLIT_ABOVE,
        enable_plan_caching: bool = False,
    ) -> None:
        caching = {"enable_plan_caching": True} if enable_plan_caching else {}
        super().__init__(flatten_state_dict, flatten_sharded_tensors, **caching)
        # torch keeps plans by this name, in the class: a planner that cuts otherwise must not get them.
        self._cached_plans_key = f"{type(self).__name__}-{split_above}"
        if split_above < 1:
            raise ValueError(f"split_above must be a positive number of bytes, not {split_above}")
        self.split_above = split_above
        self._whole: dict[str, list[WriteItem]] = {}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self._whole = defaultdict(list)
        # Not those of `plan`, which is empty when torch has cached one like it.
        for item in self.plan.items:
            self._whole[item.index.fqn].append(item)
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if not hasattr(DefaultSavePlanner, "_create_global_plan"):  # torch without plan caching
            all_plans = share_out(all_plans, self.split_above)
        plans: tuple[list[SavePlan], Metadata] = super().create_global_plan(all_plans)
        return plans

    def _create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        # With cached plans, this gets all of them, and the method above only those that have changed.
        plans: tuple[list[SavePlan], Metadata] = super()._create_global_plan(share_out(all_plans, self.split_above))
        return plans

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = write_item.tensor_data
        if data is None:
            return super().resolve_data(write_item)
        whole = next(item for item in self._whole[write_item.index.fqn] if _inside(data.chunk, item))
        tensor = self.lookup_object(whole.index).detach()
        for dimension, start in enumerate(data.chunk.offsets):
            first = start - whole.tensor_data.chunk.offsets[dimension]
            tensor = tensor.narrow(dimension, first, data.chunk.sizes[dimension])
        return self.transform_object(write_item, tensor)


def _inside(chunk: ChunkStorageMetadata, whole: WriteItem) -> bool:
    around = whole.tensor_data.chunk
    return all(
        begin <= start and start + size <= begin + length
        for start, size, begin, length in zip(chunk.offsets, chunk.sizes, around.offsets, around.sizes, strict=True)
    )


def item_bytes(item: WriteItem) -> int:
    """Bytes of the item's own chunk; 1 for an object, whose size nobody knows before it is pickled."""
    data = item.tensor_data
    return 1 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def pieces(item: WriteItem, split_above: int) -> list[WriteItem]:
    """The item cut along dimension 0 into as equal parts as rows allow, none above ``split_above`` bytes if a row is
    not; itself when nothing is to be cut."""
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
    # A TENSOR must be the only item of its name; a SHARD says the same in the metadata, and may have sisters.
    return WriteItem(
        index=MetadataIndex(item.index.fqn, offsets),
        type=WriteItemType.SHARD,
        tensor_data=dataclasses.replace(data, chunk=chunk),
    )


def share_out(plans: list[SavePlan], split_above: int) -> list[SavePlan]:
    """Every item once: what one rank alone holds stays there; then the replicated pieces, the largest first, each to
    the rank with the fewest bytes among those that hold it (the lowest of equals)."""
    holders: dict[MetadataIndex, list[int]] = defaultdict(list)
    items: dict[MetadataIndex, WriteItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            items.setdefault(item.index, item)
            if rank not in holders[item.index]:
                holders[item.index].append(rank)
    loads = [0] * len(plans)
    shares: list[list[WriteItem]] = [[] for _ in plans]
    replicated: list[tuple[WriteItem, list[int]]] = []
    for index, item in items.items():
        ranks = holders[index]
        for piece in pieces(item, split_above):
            if len(ranks) > 1:
                replicated.append((piece, ranks))
            else:
                shares[ranks[0]].append(piece)
                loads[ranks[0]] += item_bytes(piece)
    for piece, ranks in sorted(replicated, key=lambda entry: -item_bytes(entry[0])):
        rank = min(ranks, key=lambda rank: (loads[rank], rank))
        shares[rank].append(piece)
        loads[rank] += item_bytes(piece)
    return [dataclasses.replace(plan, items=share) for plan, share in zip(plans, shares, strict=True)]
