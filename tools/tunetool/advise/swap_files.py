"""The swap files of a rank under ZeRO-3, and what a step moves: to the byte, as DeepSpeed lays them out. Pure.

Repeats what DeepSpeed 0.19.8 does; each rule names its source below deepspeed/runtime. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunetool.advise import zero
from tunetool.advise.shapes import Model


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
    parts = zero.partitions(model, world)
    states: list[int] = []
    gradients: list[int] = []
    position = 0
    for group in zero.sub_groups(parts, sub_group_size):
        tensors = model.tensors[position : position + len(group)]
        position += len(group)
        # A sub-group is one flat tensor (optimizer_utils.py: is_swappable_tensor).
        if not zero.swappable(sum(group), zero.FP32, block_bytes):
            continue
        states += [zero.aligned(sum(group), parallelism, zero.FP32) * zero.FP32] * zero.STATES
        for tensor, part in zip(tensors, group, strict=True):
            # A partition that is padding alone has no gradient (stage3.py: partition_grads, contains_real_data).
            if rank * part < tensor.numel:
                gradients += _gradient(part, block_bytes, parallelism)
    return SwapFiles(
        states=states,
        gradients=gradients,
        parameters=[
            zero.aligned(part, parallelism, zero.LOW) * zero.LOW
            for part in parts
            # partitioned_param_swapper.py: swappable_tensor
            if parameters and zero.swappable(part, zero.LOW, block_bytes)
        ],
    )


def _gradient(part: int, block_bytes: int, parallelism: int) -> list[int]:
    """A tensor's gradient: the aligned part is swapped, the rest stays in memory (_adjust_for_misaligned_lengths)."""
    if not zero.swappable(part, zero.FP32, block_bytes):
        return []
    unit = zero.AIO_ALIGNED_BYTES * parallelism // zero.FP32
    whole = part // unit * unit
    return [whole * zero.FP32] if zero.swappable(whole, zero.FP32, block_bytes) else []
