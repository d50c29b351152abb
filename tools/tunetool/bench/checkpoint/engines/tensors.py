"""The states that the benchmark saves, in memory: built at random, blanked, compared bit by bit."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tunetool.bench.checkpoint.engines.base import State
from tunetool.bench.checkpoint.states import SHARD_OF, Layout, Shape, named, rows_of

DEVIATION = 0.02
"""Standard deviation of the weights: the initial value of such models."""
_COMPARED_AT_ONCE = 2**28
"""Bytes: bounds the memory that a comparison takes."""


def build(shape: Shape, device: str, rank: int = 0, world: int = 1, seed: int = 0, layout: Layout = "sharded") -> State:
    """The state on ``device``, normal at random; the same for the same seed, rank, world and kind of device.

    On one rank plain tensors. On several, ``sharded`` gives each its part of every tensor as a DTensor ``Shard(0)``
    over a mesh of all ranks, as FSDP2 holds them (torch.distributed must be initialised); ``replicated`` gives each
    the same plain tensors, as DDP holds them.
    """
    cut = world > 1 and layout == "sharded"
    generator = torch.Generator(device=device).manual_seed(seed * SHARD_OF**3 + (rank if cut else 0))
    mesh = init_device_mesh(device, (world,)) if cut else None
    state: State = {}
    for name, size, dtype in named(shape):
        local_shape = (rows_of(size[0], rank, world)[1], *size[1:]) if cut else size
        tensor = torch.empty(local_shape, dtype=getattr(torch, dtype), device=device)
        tensor.normal_(0.0, DEVIATION, generator=generator)
        if name.endswith("_sq"):
            tensor.square_()
        state[name] = tensor if mesh is None else _distributed(tensor, size, mesh)
    return state


def _distributed(part: torch.Tensor, size: tuple[int, ...], mesh: DeviceMesh) -> DTensor:
    strides = torch.empty(size, device="meta").stride()
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=torch.Size(size), stride=strides)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this rank holds, sharing its memory; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_parts(state: State) -> State:
    """``local`` of every tensor."""
    return {name: local(tensor) for name, tensor in state.items()}


def blank(state: State) -> State:
    """Zeros shaped and placed like ``state``. Not uninitialised: that memory may still hold what was freed before."""
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def equal(expected: State, restored: State) -> str | None:
    """The first difference, in one line that names the tensor; None when this rank's parts are equal bit by bit."""
    for name, tensor in expected.items():
        if name not in restored:
            return f"`{name}` is missing"
        difference = _difference(local(tensor), local(restored[name]))
        if difference:
            return f"`{name}` {difference}"
    added = next((name for name in restored if name not in expected), None)
    return None if added is None else f"`{added}` was not in the state"


def _difference(expected: torch.Tensor, restored: torch.Tensor) -> str | None:
    if expected.dtype != restored.dtype or expected.shape != restored.shape:
        was, now = (f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}" for each in (expected, restored))
        return f"is {now} and was {was}"
    left, right = (each.detach().reshape(-1).view(torch.uint8) for each in (expected, restored))
    right = right.to(left.device)
    for start in range(0, left.numel(), _COMPARED_AT_ONCE):
        pair = [each[start : start + _COMPARED_AT_ONCE] for each in (left, right)]
        if not torch.equal(*pair):
            first = start + int((pair[0] != pair[1]).nonzero()[0])
            return f"differs from byte {first} of {left.numel()}"
    return None
