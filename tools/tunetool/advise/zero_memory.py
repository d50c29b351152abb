"""Memory of each rank that weights, gradients and optimizer states take under ZeRO. Pure.

ZeRO (arXiv 1910.02054, sections 3.1 and 5): Adam in mixed precision keeps 12 bytes per trained parameter (fp32 weight,
momentum, variance); stage 1 partitions these over the ranks, stage 2 the gradients too, stage 3 the weights too. A
frozen parameter has a weight only. Activations and buffers are not included.
"""

from __future__ import annotations

from collections.abc import Mapping

from tunetool.advise.zero import FP32, LOW, STATES

ON_HOST: Mapping[str, int] = {
    "parameters": LOW,
    "accumulated gradients": LOW,
    "gradients in fp32 for the optimizer": FP32,
    "master weights, momentum, variance": STATES * FP32,
}
"""Bytes per element of a rank's partition in the node's memory where optimizer and parameters are offloaded to it."""


def state_bytes(stage: int, parameters: int, trained: int, world: int, element_bytes: int) -> float:
    """Bytes that one rank needs. ``element_bytes``: bytes per element of weights and gradients, 2 in bf16 and fp16."""
    weights = parameters * element_bytes / (world if stage >= 3 else 1)
    gradients = trained * element_bytes / (world if stage >= 2 else 1)
    states = trained * STATES * FP32 / (world if stage >= 1 else 1)
    return weights + gradients + states
