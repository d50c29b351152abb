"""Which tensors of the state a load fills, and whether it fills all of each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.tensor import DTensor

from tunetool.checkpoint.global_plan import Box, is_grid
from tunetool.checkpoint.load_planner import Chunks, DirectLoadPlanner, chunks_of
from tunetool.checkpoint.state_shape import PLAIN

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

_PLANNING = "create_local_plan", "create_global_plan", "finish_plan"
_RESOLVING = "resolve_tensor", "lookup_tensor", "transform_tensor"


def first_unfilled(planner: LoadPlanner, items: Sequence[ReadItem], described: Mapping[str, Any]) -> str | None:
    """The first tensor of the state of which ``items`` fill no element, some, or some twice; None if there is none.

    ``described``: the tensors of the checkpoint. None also for a planner with a plan of its own, which may ask for less
    than its state.
    """
    if not _has_torchs(planner, *_PLANNING):
        return None
    asked: dict[str, list[ReadItem]] = {}
    for item in items:
        if item.type != LoadItemType.BYTE_IO:
            asked.setdefault(item.dest_index.fqn, []).append(item)
    state: Mapping[str, Any] = planner.state_dict
    chunks: Chunks = {}
    for name, value in state.items():
        if name not in described or isinstance(described[name], BytesStorageMetadata):
            continue
        its = asked.get(name, ())
        if len(its) == 1 and type(value) in PLAIN and _is_whole(its[0], value):
            continue
        boxes: dict[Any, list[Box]] = {}
        for item in its:
            boxes.setdefault(item.dest_index.offset, []).append((item.dest_offsets, item.lengths))
        for offsets, sizes in _asked(value, chunks):
            if 0 not in sizes and not fills(sizes, boxes.get(offsets, ())):
                return name
    return None


def _is_whole(item: ReadItem, value: torch.Tensor) -> bool:
    """Whether the item's target is all of a plain tensor."""
    at = item.dest_index.offset
    return at is not None and not any(at) and value.shape == item.lengths and not any(item.dest_offsets)


def targets_of(planner: LoadPlanner, items: Sequence[ReadItem]) -> Iterator[torch.Tensor]:
    """What each item fills, without its gradient."""
    state: Mapping[str, Any] = planner.state_dict if _has_torchs(planner, *_RESOLVING) else {}
    for item in items:
        target: Any = state.get(item.dest_index.fqn)
        if type(target) is DTensor and type(target._local_tensor) in PLAIN:
            target = narrow_tensor_by_index(target._local_tensor.detach(), item.dest_offsets, item.lengths)
        elif type(target) not in PLAIN or not _is_whole(item, target):
            target = planner.resolve_tensor(item)
        # Of a new object, which few need, `is_plain` knows less.
        yield target if type(target) is torch.Tensor and not target.requires_grad else target.detach()


def _has_torchs(planner: LoadPlanner, *steps: str) -> bool:
    """Whether the planner does what torch's does in these steps."""
    return isinstance(planner, DefaultLoadPlanner) and all(
        getattr(type(planner), step) in (getattr(DefaultLoadPlanner, step), getattr(DirectLoadPlanner, step))
        and step not in vars(planner)
        for step in steps
    )


def _asked(value: Any, known: Chunks) -> Iterator[Box]:
    """Offsets and sizes of the chunks of a value of the state that this rank holds."""
    if type(value) in PLAIN:
        yield torch.Size([0] * value.dim()), value.shape
    elif not isinstance(value, DTensor) or value.device_mesh.get_coordinate() is not None:
        for chunk in chunks_of(value, known):
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
