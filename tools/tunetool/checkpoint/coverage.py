"""Whether a load fills all that is asked for: chunks of damaged metadata can leave elements as they were."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.tensor import DTensor

from tunetool.checkpoint.global_plan import Box, is_grid
from tunetool.checkpoint.state_shape import PLAIN


def first_unfilled(planner: LoadPlanner, items: Sequence[ReadItem], described: Mapping[str, Any]) -> str | None:
    """The first tensor of the state of which ``items`` fill no element, some, or some twice; None if there is none.

    ``described``: the tensors of the checkpoint. None also for a planner with a plan of its own, which may ask for less
    than its state.
    """
    if not _plans_as_torch(planner):
        return None
    boxes: dict[tuple[str, Any], list[Box]] = {}
    for item in items:
        if item.type != LoadItemType.BYTE_IO:
            key = item.dest_index.fqn, item.dest_index.offset
            boxes.setdefault(key, []).append((item.dest_offsets, item.lengths))
    state: Mapping[str, Any] = planner.state_dict
    for name, value in state.items():
        if name not in described or isinstance(described[name], BytesStorageMetadata):
            continue
        for offsets, sizes in _asked(value):
            if 0 not in sizes and not fills(sizes, boxes.get((name, offsets), ())):
                return name
    return None


def _plans_as_torch(planner: LoadPlanner) -> bool:
    steps = ("create_local_plan", "create_global_plan", "finish_plan")
    return isinstance(planner, DefaultLoadPlanner) and all(
        getattr(type(planner), step) is getattr(DefaultLoadPlanner, step) for step in steps
    )


def _asked(value: Any) -> Iterator[Box]:
    """Offsets and sizes of the chunks of a value of the state that this rank holds."""
    if type(value) in PLAIN:
        yield torch.Size([0] * value.dim()), value.shape
    elif not isinstance(value, DTensor) or value.device_mesh.get_coordinate() is not None:
        for chunk in _create_chunk_list(value):
            yield chunk.offsets, chunk.sizes


def fills(size: torch.Size, boxes: Sequence[Box]) -> bool:
    """Whether every element of a tensor of this size is in exactly one box."""
    if is_grid(size, boxes):
        return True
    filled = [box for box in boxes if 0 not in box[1]]
    volume = sum(math.prod(sizes) for _, sizes in filled)
    return volume == math.prod(size) and _each_once(size, filled, 0)


def _each_once(size: Sequence[int], boxes: Sequence[Box], dimension: int) -> bool:
    if dimension == len(size):
        return len(boxes) == 1
    ends = {end for offsets, sizes in boxes for end in (offsets[dimension], offsets[dimension] + sizes[dimension])}
    if min(ends, default=0) < 0 or max(ends, default=0) > size[dimension]:
        return False
    waiting = sorted(boxes, key=lambda box: box[0][dimension], reverse=True)
    inside: list[Box] = []
    for low, _ in itertools.pairwise(sorted({0, *ends, size[dimension]})):
        inside = [box for box in inside if box[0][dimension] + box[1][dimension] > low]
        while waiting and waiting[-1][0][dimension] <= low:
            inside.append(waiting.pop())
        if not _each_once(size, inside, dimension + 1):
            return False
    return True
