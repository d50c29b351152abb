"""The shapes of the states that the benchmark saves. Pure; ``tensors.py`` builds them.

A parameter counts 14 bytes: its bf16 weight, and in fp32 the master weight, ``exp_avg`` and ``exp_avg_sq``. That is
what mixed-precision training with bf16 weights and fp32 Adam saves: DeepSpeed's ZeRO (the module's bf16 weights, and
per rank ``single_partition_of_fp32_groups`` with Adam's two states; read in deepspeed 0.19.8) and Megatron's
distributed optimizer. FSDP2 with fp32 parameters saves 12. DeepSpeed's published "14.23 GB" for Phi-3-mini is its
3,821,079,552 parameters at 4 bytes, counted in GiB: fp32 weights and no optimizer.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from tunetool.advise.read_model import load_model
from tunetool.advise.shapes import Model, Tensor
from tunetool.errors import UsageProblem
from tunetool.node.units import format_size

SHARD_OF = 64
"""Number of equal shards, of which ``70b-shard`` is one."""
SHARD = "70b-shard"
KINDS: Sequence[tuple[str, str, int]] = (
    ("model.{}", "bfloat16", 2),
    ("optimizer.{}.fp32", "float32", 4),
    ("optimizer.{}.exp_avg", "float32", 4),
    ("optimizer.{}.exp_avg_sq", "float32", 4),
)
"""Name, dtype and bytes of each tensor that is saved for a parameter."""
BYTES_PER_PARAMETER = sum(size for *_, size in KINDS)
Layout = Literal["sharded", "replicated"]


@dataclass(frozen=True)
class Shape:
    """A state's tensors by their GLOBAL shapes, over all ranks that hold a part."""

    model: str
    source: str
    parameters: tuple[Tensor, ...]
    layers: int
    """Layers in the state."""
    of_layers: int
    """Layers of the whole model."""
    outside: bool = True
    """Whether the embedding and the other tensors outside of layers are in it."""
    cut: bool = False
    """Whether parameters were cut, for a number of tensors that somebody asked for."""

    @property
    def bytes(self) -> int:
        """Bytes of the whole state."""
        return BYTES_PER_PARAMETER * sum(tensor.numel for tensor in self.parameters)

    @property
    def tensors(self) -> int:
        """Number of tensors."""
        return len(KINDS) * len(self.parameters)

    def describe(self) -> str:
        """The state described in one line."""
        left = "" if self.layers == self.of_layers else f", {self.layers} of {self.of_layers} layers"
        bare = "" if self.outside else " and nothing outside of them"
        cut = ", cut" if self.cut else ""
        return f"{self.model}{left}{bare}{cut}: {self.tensors} tensors, {format_size(self.bytes)}"


def shape(model: str, state_bytes: int | None = None, shards: int = 1, tensors: int | None = None) -> Shape:
    """The state of a model as ``load_model`` takes it, or of ``70b-shard``: ``shards`` of 64, one for each rank.

    ``state_bytes`` bounds the state of all ranks together: whole layers are dropped from the end, and the tensors
    outside of layers where not even one layer fits beside them. ``tensors``: the number of tensors into which what is
    left is cut. Raises ``UsageProblem`` for an unknown model, too small a bound, and a number that no cuts give.
    """
    whole = _whole(model, state_bytes, shards)
    return whole if tensors is None else _cut(whole, tensors)


def _whole(model: str, state_bytes: int | None, shards: int) -> Shape:
    if model != SHARD:
        return _fit(load_model(model), state_bytes)
    if not 1 <= shards <= SHARD_OF:
        raise UsageProblem(f"`--model {SHARD}` has {SHARD_OF} shards, not {shards}", f"run at most {SHARD_OF} ranks")
    whole = load_model("70b")
    parameters = tuple(_rows(tensor, shards) for tensor in whole.tensors)
    return _fit(replace(whole, name=SHARD, tensors=parameters), state_bytes)


def _rows(tensor: Tensor, shards: int) -> Tensor:
    """``shards`` of the 64 parts of a tensor, along dimension 0."""
    return replace(tensor, shape=(-(-tensor.shape[0] // SHARD_OF) * shards, *tensor.shape[1:]))


def _fit(model: Model, bound: int | None) -> Shape:
    sizes: dict[str | None, int] = {}
    for tensor in model.tensors:
        sizes[tensor.block] = sizes.get(tensor.block, 0) + BYTES_PER_PARAMETER * tensor.numel
    layers = [layer for layer in sizes if layer is not None]
    full = Shape(model.name, model.source, model.tensors, len(layers), len(layers))
    if bound is None or full.bytes <= bound:
        return full
    for outside in (True, False):
        room = bound - (sizes.get(None, 0) if outside else 0)
        count = sum(end <= room for end in accumulate(sizes[layer] for layer in layers))
        if count:
            kept = {*layers[:count], *([None] if outside else [])}
            parameters = tuple(tensor for tensor in model.tensors if tensor.block in kept)
            return replace(full, parameters=parameters, layers=count, outside=outside)
    if not layers:
        raise UsageProblem(
            f"`--state-bytes {bound}` is too little for `--model {model.name}`: it has no layers to leave out",
            f"ask for `{full.bytes}B` or more",
        )
    smaller = "" if model.name == SHARD else f", or take `{SHARD}`, whose layers are smaller"
    raise UsageProblem(
        f"`--state-bytes {bound}` is too little for `--model {model.name}`: its first layer takes "
        f"{format_size(sizes[layers[0]])}",
        f"ask for `{sizes[layers[0]]}B` or more{smaller}",
    )


def _cut(whole: Shape, tensors: int) -> Shape:
    """The same bytes in so many tensors: the largest parameters are cut along dimension 0, in nearly equal parts."""
    asked, least = tensors // len(KINDS), len(whole.parameters)
    most = sum(max(1, parameter.shape[0]) for parameter in whole.parameters)
    if tensors % len(KINDS) or not least <= asked <= most:
        nearest = len(KINDS) * min(max(asked, least), most)
        raise UsageProblem(
            f"`--tensors {tensors}`: {whole.describe()}, which can be cut into {len(KINDS) * least} to "
            f"{len(KINDS) * most}, a multiple of {len(KINDS)}",
            f"ask for {nearest}, or for fewer or more bytes with `--state-bytes`",
        )
    parts = [1] * least
    heap = [(-parameter.numel, number) for number, parameter in enumerate(whole.parameters) if parameter.shape[0] > 1]
    heapq.heapify(heap)
    for _ in range(asked - least):
        _, number = heapq.heappop(heap)
        parts[number] += 1
        parameter = whole.parameters[number]
        if parts[number] < parameter.shape[0]:
            heapq.heappush(heap, (-parameter.numel // parts[number], number))
    cut = (part for parameter, count in zip(whole.parameters, parts, strict=True) for part in _parts(parameter, count))
    return replace(whole, parameters=tuple(cut), cut=asked > least)


def _parts(parameter: Tensor, count: int) -> Iterator[Tensor]:
    if count == 1:
        yield parameter
        return
    rows = parameter.shape[0]
    for number in range(count):
        length = rows * (number + 1) // count - rows * number // count
        yield replace(parameter, name=f"{parameter.name}.part{number}", shape=(length, *parameter.shape[1:]))


def named(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, global shape and dtype of every tensor, weights first."""
    for pattern, dtype, _ in KINDS:
        for tensor in shape.parameters:
            yield pattern.format(tensor.name), tensor.shape, dtype


def rows_of(rows: int, rank: int, world: int) -> tuple[int, int]:
    """First row and number of rows of a rank's part, as DTensor's ``Shard(0)`` cuts (``torch.chunk``)."""
    each = -(-rows // world)
    first = min(rank * each, rows)
    return first, min(each, rows - first)


def rank_bytes(shape: Shape, rank: int, world: int, layout: Layout = "sharded") -> int:
    """Bytes that a rank holds."""
    if layout == "replicated":
        return shape.bytes
    parts = (rows_of(tensor.shape[0], rank, world)[1] * math.prod(tensor.shape[1:]) for tensor in shape.parameters)
    return BYTES_PER_PARAMETER * sum(parts)
