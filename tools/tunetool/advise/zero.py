"""What DeepSpeed makes of a model under ZeRO: partitions, tiles, buffers, bytes. Pure.

Each function repeats a calculation of DeepSpeed's and names it; read in deepspeed 0.19.8, below deepspeed/runtime. All
counts are ELEMENTS unless a name says bytes: so does DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Sequence

from tunetool.advise.shapes import Model, Tensor

FP32 = 4
LOW = 2
"""Bytes of an element in bf16 and fp16."""
STATES = 3
"""fp32 tensors that Adam keeps for each parameter: master weight, momentum, variance."""
MIN_AIO_BYTES = 2**20
"""swap_tensor/utils.py: smaller pieces are never swapped."""
AIO_ALIGNED_BYTES = 1024
"""swap_tensor/utils.py: each thread of the handle moves a multiple of this."""
SECTOR = 512
DEFAULT_SUB_GROUP = 10**9
"""zero/config.py: sub_group_size."""


def partition(numel: int, world: int) -> int:
    """One rank's part of a tensor, padded (zero/partition_parameters.py: _aligned_size)."""
    return -(-numel // world)


def partitions(model: Model, world: int) -> list[int]:
    """One rank's part of each tensor, in order."""
    return [partition(tensor.numel, world) for tensor in model.tensors]


def aligned(numel: int, parallelism: int, element_bytes: int) -> int:
    """So many elements are moved for ``numel`` (swap_tensor/optimizer_utils.py: _io_aligned_numel)."""
    unit = AIO_ALIGNED_BYTES * parallelism // element_bytes
    return -(-numel // unit) * unit


def swappable(numel: int, element_bytes: int, block_bytes: int) -> bool:
    """Whether a piece goes to NVMe; smaller ones stay in memory (is_swappable_tensor, swappable_tensor)."""
    return max(MIN_AIO_BYTES, block_bytes) <= numel * element_bytes


def sub_groups(parts: Sequence[int], sub_group_size: int) -> list[list[int]]:
    """Tiles of the optimizer step: each is closed by the part that fills it (stage3.py: _create_fp16_sub_groups)."""
    if sub_group_size >= sum(parts):
        return [list(parts)]
    groups: list[list[int]] = [[]]
    for part in parts:
        groups[-1].append(part)
        if sum(groups[-1]) >= sub_group_size:
            groups.append([])
    return [group for group in groups if group]


def largest_group(parts: Sequence[int], sub_group_size: int) -> int:
    """Elements of the largest tile, for which each of the optimizer's buffers is made."""
    return max(sum(group) for group in sub_groups(parts, sub_group_size))


def optimizer_buffer_count(pipeline_read: bool, pipeline_write: bool) -> int:
    """A tile takes four: master weight, momentum, variance, gradient. The next and the last one are in flight beside it
    (swap_tensor/pipelined_optimizer_swapper.py).
    """
    return (STATES + 1) * (1 + pipeline_read + pipeline_write)


def swapped_tensors(model: Model, world: int, block_bytes: int) -> list[Tensor]:
    """Tensors of which a rank's part goes to NVMe when parameters are offloaded."""
    return [tensor for tensor in model.tensors if swappable(partition(tensor.numel, world), LOW, block_bytes)]


def most_swapped_in_a_layer(tensors: Sequence[Tensor]) -> int:
    """Swapped tensors of the layer that has most of them, 1 at least."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        if tensor.block is not None:
            counts[tensor.block] = counts.get(tensor.block, 0) + 1
    return max([1, *counts.values()])


def misread_gradients(parts: Sequence[int], sub_group_size: int, block_bytes: int, address_bytes: int) -> int:
    """Gradients that DeepSpeed would read back to an address that direct I/O cannot reach.

    A swapped gradient is read to its place inside its tile's buffer (get_swap_gradient_buffers). ``aio_handle`` answers
    an address that is no multiple of ``address_bytes`` with success and moves nothing: the optimizer then takes what an
    older tile left there.
    """
    found = 0
    for group in sub_groups(parts, sub_group_size):
        offset = 0
        for part in group:
            if swappable(part, FP32, block_bytes) and offset * FP32 % address_bytes:
                found += 1
            offset += part
    return found


def nvme_bytes(parts: Sequence[int], states: bool, parameters: bool) -> int:
    """What one rank's swap files take: states and gradients in fp32, parameters in two bytes."""
    return sum(parts) * ((STATES + 1) * FP32 * states + LOW * parameters)
