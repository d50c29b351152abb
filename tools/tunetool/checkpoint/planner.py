"""Which rank writes which tensor: replicated tensors are distributed over the ranks that hold them, and large tensors
are cut along dimension 0."""

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
"""Bytes. Small enough to distribute 8 GB evenly over 16 files, large enough for readers to see few chunks."""


class DirectSavePlanner(DefaultSavePlanner):
    """torch's planner with two additions: tensors that several ranks hold are distributed among them by bytes, and a
    tensor (or shard) of more than ``split_above`` bytes is saved as several chunks along dimension 0, which different
    ranks and files can take.

    The metadata has torch's format: a cut tensor looks like a sharded one, so DefaultLoadPlanner with any reader loads
    it into any layout. The plan depends only on the ranks' plans. ``ValueError`` unless ``split_above`` is positive.

    ``enable_plan_caching``: as in torch's planner, ranks whose part of the state has kept its shape since the last save
    send no plan. ``TypeError`` if torch is too old for it.
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
        # torch caches plans in the class under this key: a planner with another `split_above` must not use them.
        self._cached_plans_key = f"{type(self).__name__}-{split_above}"
        if split_above < 1:
            raise ValueError(f"split_above must be a positive number of bytes, not {split_above}")
        self.split_above = split_above
        self._whole: dict[str, list[WriteItem]] = {}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self._whole = defaultdict(list)
        # Not the items of `plan`, which is empty if torch has cached an equal plan.
        for item in self.plan.items:
            self._whole[item.index.fqn].append(item)
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if not hasattr(DefaultSavePlanner, "_create_global_plan"):  # torch without plan caching
            all_plans = share_out(all_plans, self.split_above)
        plans: tuple[list[SavePlan], Metadata] = super().create_global_plan(all_plans)
        return plans

    def _create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        # With cached plans, this method gets all plans, and the method above only the changed ones.
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


def share_out(plans: list[SavePlan], split_above: int) -> list[SavePlan]:
    """Assign every item to one rank: an item that only one rank holds stays there; then the replicated pieces, the
    largest first, each go to the rank with the fewest bytes among those that hold it (the lowest of equals)."""
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
