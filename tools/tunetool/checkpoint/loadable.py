"""What can be saved at all: tensors that the readers of distributed checkpoints, ours and torch's, can load again."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from tunetool.checkpoint.raw_bytes import ITEM_SIZES
from tunetool.errors import CannotJudge

_NO_READER = "which no reader of distributed checkpoints loads"


def refused(name: str, kind: str, reason: str) -> CannotJudge:
    """The error for a tensor of the class ``kind`` that cannot be saved."""
    # Of torch's unpickler, whose message begins with half a page on how to disable it.
    unpickler = re.search(r"WeightsUnpickler error: (.*)", reason)
    return CannotJudge(
        f"`{name}`, a `{kind}`, cannot be saved: {unpickler[1] if unpickler else reason.partition(chr(10))[0]}",
        "leave it out of the state, or save the plain tensors that it is made of",
    )


def refuse_state(state: Mapping[str, Any]) -> None:
    """Raises ``CannotJudge`` for the first tensor with a layout or a dtype that cannot be loaded."""
    for name, value in state.items():
        tensor = value._local_tensor if type(value) is DTensor else value
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, ShardedTensor):
            continue  # a ShardedTensor refuses such questions; the items of its shards answer them
        try:
            require_layout(tensor)
            if not tensor.is_quantized:
                name_of(tensor.dtype)
        except ValueError as error:
            raise refused(name, type(value).__name__, str(error)) from error


def refuse_items(writes: Iterable[WriteItem]) -> None:
    """``refuse_state`` by the layouts in the items of a plan."""
    for write in writes:
        described = write.tensor_data
        if described is not None and described.properties.layout is not torch.strided:
            raise refused(write.index.fqn, "Tensor", _of_layout(described.properties.layout))


def require_layout(tensor: torch.Tensor) -> None:
    """Raises ``ValueError`` for sparse, nested and other tensors that are not one dense array."""
    if tensor.layout is not torch.strided:
        raise ValueError(_of_layout(tensor.layout))
    if tensor.is_nested:
        raise ValueError(f"it is nested, {_NO_READER}")


def _of_layout(layout: torch.layout) -> str:
    return f"its layout is `{layout}`, {_NO_READER}"


def as_torch_saves(tensor: torch.Tensor) -> bytes:
    """A tensor that is more than its memory, such as a quantized one, as ``torch.save`` writes it. Raises any exception
    if it cannot be loaded from that."""
    require_layout(tensor)
    stream = io.BytesIO()
    torch.save(tensor.cpu(), stream)
    _fill_from(stream)
    return stream.getvalue()


def _fill_from(saved: io.BytesIO) -> None:
    """What both readers do with a tensor that ``torch.save`` wrote."""
    saved.seek(0)
    loaded = torch.load(saved, map_location="cpu", weights_only=True)
    torch.empty_like(loaded).copy_(loaded)


@lru_cache(256)
def name_of(dtype: torch.dtype) -> str:
    """torch's name of a dtype. Raises ``ValueError`` for one that cannot be loaded, such as ``uint4``."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_SIZES:
        saved = io.BytesIO()
        try:
            torch.save(torch.empty(8, dtype=torch.uint8).view(dtype), saved)
            _fill_from(saved)
        except Exception as error:  # whatever torch raises for a dtype that it knows in parts
            raise ValueError(f"its dtype is `{dtype}`, {_NO_READER}") from error
    return name
