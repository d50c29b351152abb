"""States that change from step to step: what ranks save, and what must come back."""

from __future__ import annotations

import zlib
from typing import Any

import torch

Tensors = dict[str, dict[str, Any]]
"""By name: ``shape``, ``dtype``, and ``place``: ``shard0``, ``shard1``, ``replicate``, ``plain`` (on every rank), or
``own`` (on each rank another tensor, whose name ends with its number)."""


def whole(name: str, step: int, shape: list[int], dtype: str) -> torch.Tensor:
    """The whole tensor at a step: no two steps and no two names have the same values."""
    made = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randint(-100, 100, shape, generator=made).to(getattr(torch, dtype))


def expected(step: int, tensors: Tensors, world: int) -> dict[str, Any]:
    """The state as one reader must get it."""
    state: dict[str, Any] = {"step": step}
    for name, of in tensors.items():
        for each in [f"{name}{rank}" for rank in range(world)] if of["place"] == "own" else [name]:
            state[each] = whole(each, step, of["shape"], of["dtype"])
    return state
