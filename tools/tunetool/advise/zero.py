"""How DeepSpeed divides a model under ZeRO: partitions, sub-groups, buffers, bytes, memory of each rank; the swap files
of a rank, and what a step moves of them, to the byte. Pure.

Each function repeats a calculation of DeepSpeed 0.19.8 and names its source below deepspeed/runtime. All counts are
ELEMENTS unless a name says bytes, as in DeepSpeed. ``SwapFiles`` are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunetool.advise.shapes import Model, Tensor

FP32 = 4
LOW = 2
"""Bytes per element in bf16 and fp16."""
STATES = 3
"""fp32 tensors that mixed-precision Adam keeps per parameter: master weight, momentum, variance."""
MIN_AIO_BYTES = 2**20
"""swap_tensor/utils.py: smaller partitions are never swapped."""
AIO_ALIGNED_BYTES = 1024
"""swap_tensor/utils.py: each thread of the handle transfers a multiple of this."""
SECTOR = 512
DEFAULT_SUB_GROUP = 10**9
"""zero/config.py: sub_group_size."""


def partition(numel: int, world: int) -> int:
    """Elements of one rank's partition of a tensor, padded (zero/partition_parameters.py: _aligned_size)."""
    return -(-numel // world)


def partitions(model: Model, world: int) -> list[int]:
    """Elements of one rank's partition of each tensor, in order."""
    return [partition(tensor.numel, world) for tensor in model.tensors]


def aligned(numel: int, parallelism: int, element_bytes: int) -> int:
    """Elements that DeepSpeed transfers for ``numel`` (swap_tensor/optimizer_utils.py: _io_aligned_numel)."""
    unit = AIO_ALIGNED_BYTES * parallelism // element_bytes
    return -(-numel // unit) * unit


def swappable(numel: int, element_bytes: int, block_bytes: int) -> bool:
    """Whether a partition goes to NVMe; smaller ones stay in memory (is_swappable_tensor, swappable_tensor)."""
    return max(MIN_AIO_BYTES, block_bytes) <= numel * element_bytes


def sub_groups(parts: Sequence[int], sub_group_size: int) -> list[list[int]]:
    """Sub-groups of the optimizer step; the partition that fills one is its last.

    See stage3.py: _create_fp16_sub_groups.
    """
    if sub_group_size >= sum(parts):
        return [list(parts)]
    groups: list[list[int]] = [[]]
    for part in parts:
        groups[-1].append(part)
        if sum(groups[-1]) >= sub_group_size:
            groups.append([])
    return [group for group in groups if group]


def largest_group(parts: Sequence[int], sub_group_size: int) -> int:
    """Elements of the largest sub-group, which is the size of each of the optimizer's buffers."""
    return max(sum(group) for group in sub_groups(parts, sub_group_size))


def optimizer_buffer_count(pipeline_read: bool, pipeline_write: bool) -> int:
    """Buffers of the optimizer: four per sub-group (master weight, momentum, variance, gradient). Pipelined reads and
    writes each keep one more sub-group in flight (swap_tensor/pipelined_optimizer_swapper.py).
    """
    return (STATES + 1) * (1 + pipeline_read + pipeline_write)


def swapped_tensors(model: Model, world: int, block_bytes: int) -> list[Tensor]:
    """Tensors whose partitions go to NVMe when parameters are offloaded."""
    return [tensor for tensor in model.tensors if swappable(partition(tensor.numel, world), LOW, block_bytes)]


def most_swapped_in_a_layer(tensors: Sequence[Tensor]) -> int:
    """Number of swapped tensors of the layer that has the most, at least 1."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        if tensor.block is not None:
            counts[tensor.block] = counts.get(tensor.block, 0) + 1
    return max([1, *counts.values()])


def misread_gradients(parts: Sequence[int], sub_group_size: int, block_bytes: int, address_bytes: int) -> int:
    """Number of gradients that DeepSpeed would read back to an address that direct I/O cannot reach.

    DeepSpeed reads a swapped gradient to its offset in its sub-group's buffer (get_swap_gradient_buffers). For an
    address that is not a multiple of ``address_bytes``, ``aio_handle`` reports success and transfers nothing: the
    optimizer then uses what an earlier sub-group left there.
    """
    count = 0
    for group in sub_groups(parts, sub_group_size):
        offset = 0
        for part in group:
            if swappable(part, FP32, block_bytes) and offset * FP32 % address_bytes:
                count += 1
            offset += part
    return count


def nvme_bytes(parts: Sequence[int], states: bool, parameters: bool) -> int:
    """Bytes of one rank's swap files: states and gradients in fp32, parameters in two bytes."""
    return sum(parts) * ((STATES + 1) * FP32 * states + LOW * parameters)


ON_HOST: Mapping[str, int] = {
    "parameters": LOW,
    "accumulated gradients": LOW,
    "gradients in fp32 for the optimizer": FP32,
    "master weights, momentum, variance": STATES * FP32,
}
"""Bytes per element of a rank's partition in the node's memory where optimizer and parameters are offloaded to it."""


def state_bytes(stage: int, parameters: int, trained: int, world: int, element_bytes: int) -> float:
    """Bytes of weights, gradients and optimizer states that one rank needs. ``element_bytes``: bytes per element of
    weights and gradients, 2 in bf16 and fp16.

    ZeRO (arXiv 1910.02054, sections 3.1 and 5): Adam in mixed precision keeps 12 bytes per trained parameter (fp32
    weight, momentum, variance); stage 1 partitions these over the ranks, stage 2 the gradients too, stage 3 the weights
    too. A frozen parameter has a weight only. Activations and buffers are not included.
    """
    weights = parameters * element_bytes / (world if stage >= 3 else 1)
    gradients = trained * element_bytes / (world if stage >= 2 else 1)
    states = trained * STATES * FP32 / (world if stage >= 1 else 1)
    return weights + gradients + states


@dataclass(frozen=True)
class SwapFiles:
    """The sizes of one rank's files by what they hold, one for each file."""

    states: Sequence[int]
    """Master weights, momenta and variances: three of each sub-group that is large enough."""
    gradients: Sequence[int]
    parameters: Sequence[int]

    @property
    def sizes(self) -> list[int]:
        """All of them, the smallest first."""
        return sorted([*self.states, *self.gradients, *self.parameters])

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(self.sizes)

    @property
    def written(self) -> int:
        """Bytes written in a step: each file once."""
        return self.total

    @property
    def read(self) -> int:
        """Bytes read in a step, at most: states and gradients once, parameters for either pass. What the backward pass
        wants first may still be there."""
        return sum(self.states) + sum(self.gradients) + 2 * sum(self.parameters)


def swap_files(
    model: Model, world: int, rank: int, sub_group_size: int, block_bytes: int, parallelism: int, parameters: bool
) -> SwapFiles:
    """The files of ``rank`` of ``world``, after its first step.

    ``sub_group_size`` in elements; ``block_bytes`` and ``parallelism`` of the ds_config's ``aio`` block;
    ``parameters``: whether they are swapped too.
    """
    parts = partitions(model, world)
    states: list[int] = []
    gradients: list[int] = []
    position = 0
    for group in sub_groups(parts, sub_group_size):
        tensors = model.tensors[position : position + len(group)]
        position += len(group)
        # A sub-group is one flat tensor (optimizer_utils.py: is_swappable_tensor).
        if not swappable(sum(group), FP32, block_bytes):
            continue
        states += [aligned(sum(group), parallelism, FP32) * FP32] * STATES
        for tensor, part in zip(tensors, group, strict=True):
            # A partition that is padding alone has no gradient (stage3.py: partition_grads, contains_real_data).
            if rank * part < tensor.numel:
                gradients += _gradient(part, block_bytes, parallelism)
    return SwapFiles(
        states=states,
        gradients=gradients,
        parameters=[
            aligned(part, parallelism, LOW) * LOW
            for part in parts
            # partitioned_param_swapper.py: swappable_tensor
            if parameters and swappable(part, LOW, block_bytes)
        ],
    )


def _gradient(part: int, block_bytes: int, parallelism: int) -> list[int]:
    """A tensor's gradient: the aligned part is swapped, the rest stays in memory (_adjust_for_misaligned_lengths)."""
    if not swappable(part, FP32, block_bytes):
        return []
    unit = AIO_ALIGNED_BYTES * parallelism // FP32
    whole = part // unit * unit
    return [whole * FP32] if swappable(whole, FP32, block_bytes) else []
