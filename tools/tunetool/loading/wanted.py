"""What a load gives its caller of each stored tensor: all of it, or this rank's part."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from tunetool.checkpoint.fetch import Want
from tunetool.checkpoint.raw_bytes import ITEM_SIZES, Plain
from tunetool.errors import UsageProblem
from tunetool.loading.fill import want
from tunetool.loading.safetensors_files import Listing, Stored, shown

if TYPE_CHECKING:
    from tunetool.loading.shard_plan import ShardPlan
    from tunetool.loading.slices import Part


class Wanted(NamedTuple):
    """A stored tensor, of which the caller gets ``part`` (None: all of it) as a tensor of this shape and dtype."""

    stored: Stored
    part: Part | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of the tensor that the caller gets."""
        return math.prod(self.shape) * ITEM_SIZES[self.stored.dtype]

    def wants(self, target: Any) -> list[Want]:
        """The readings that fill ``target``."""
        return [want(self.stored, target)] if self.part is None else list(part_wants(self.stored, self.part, target))


def wanted_of(listing: Listing, shard: ShardPlan | None) -> list[Wanted]:
    """Of each tensor what ``shard`` gives this rank, in the order of the files. Raises ``UsageProblem`` where the plan
    does not fit, and for a dtype that this torch lacks."""
    if shard is not None and not hasattr(shard, "parts"):
        raise UsageProblem(f"`shard` is a `{type(shard).__name__}`", "give a `ShardPlan`, which has rank and size too")
    parts = {} if shard is None else shard.parts(listing)
    wanted = []
    for name, tensor in listing.tensors.items():
        part = parts.get(name)
        shape = tensor.shape if part is None else part.shape
        wanted.append(Wanted(tensor, part, shape, _dtype(listing, tensor)))
    return wanted


def part_wants(tensor: Stored, part: Part, target: Any) -> Iterator[Want]:
    """The readings of a part of a stored tensor into ``target``, which has the part's shape."""
    plain = Plain(0, tensor.length, tensor.dtype, tensor.shape)
    for box in part.boxes():
        place = target
        for dim, (at, count) in enumerate(zip(box.at, box.lengths, strict=True)):
            place = place.narrow(dim, at, count)
        yield Want(tensor.name, tensor.file, tensor.start, plain, box.offsets, box.lengths, place)


def _dtype(listing: Listing, tensor: Stored) -> torch.dtype:
    dtype = getattr(torch, tensor.dtype, None)
    if dtype is None:
        raise UsageProblem(
            f"`{listing.directory / tensor.file}`: {shown(tensor.name)} has dtype {tensor.dtype}, which torch "
            f"{torch.__version__} does not have",
            "use a newer torch",
        )
    return cast("torch.dtype", dtype)
