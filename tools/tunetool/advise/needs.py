"""What a model needs under each ZeRO stage and offload: memory, space and bandwidth of NVMe, checkpoints. Pure.

P is the number of parameters, all of them trained with Adam in bf16 or fp16; N the number of GPUs.

===================================  ==========================  =======================================================
what                                 bytes                       source
===================================  ==========================  =======================================================
weights, gradients                   2 P each                    ZeRO (arXiv 1910.02054), section 3.1
optimizer (fp32 master weights,      12 P                        the same
momentum, variance)
a GPU's share                        P or P / N                  the same, section 5: ``state_bytes``
gathered weights of ZeRO-3           2 max_live_parameters       DeepSpeed, zero/config.py: ``ds_config.live``
swap files: optimizer                16 P / N                    DeepSpeed, swap_tensor: states, and gradients in fp32
swap files: parameters               2 P / N                     the same: ``zero.nvme_bytes``
read in a step                       16 P + 3 x 2 P x passes     ZeRO-Infinity (arXiv 2104.07857), section 4.1: forward,
                                                                 recomputation and backward each read the parameters
written in a step                    16 P + 2 P                  the same: states and gradients, new parameters
checkpoint, weights alone            2 P                         ``checkpoint.WEIGHTS``
checkpoint, full state               14 P                        ``checkpoint.FULL_STATE``
bandwidth to save                    bytes / seconds             seconds asked for, or interval x share of the time
===================================  ==========================  =======================================================

Activations, buffers for swapping and communication, and the allocator's gaps come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tunetool.advise import zero
from tunetool.advise.checkpoint import FULL_STATE, WEIGHTS
from tunetool.advise.ds_config import MEMORY_SHARE, live
from tunetool.advise.expert_decoder import active
from tunetool.advise.shapes import Model
from tunetool.advise.zero import ON_HOST, state_bytes
from tunetool.node.units import format_size, format_size_binary

PARAMETER_READS = 3
"""Of each micro batch under activation checkpointing: forward, recomputation, backward."""
OFFLOADS = ("none", "cpu", "nvme-optimizer", "nvme")
"""What leaves the GPUs: nothing; optimizer and parameters, to the node's memory; the optimizer or both, to NVMe."""


@dataclass(frozen=True)
class Strategy:
    """A ZeRO stage, and one of ``OFFLOADS``."""

    stage: int
    offload: str = "none"

    @property
    def name(self) -> str:
        """For people."""
        return f"ZeRO-{self.stage}" + (f", {_OFFLOADED[self.offload]}" if self.offload != "none" else "")


_OFFLOADED = {"cpu": "offload to memory", "nvme-optimizer": "optimizer on NVMe", "nvme": "all on NVMe"}
STRATEGIES = (*(Strategy(stage) for stage in range(4)), *(Strategy(3, offload) for offload in OFFLOADS[1:]))
"""From the least sharing to the most. DeepSpeed offloads to NVMe under stage 3 alone."""


@dataclass(frozen=True)
class Machines:
    """What the job runs on; None: not known, or without a limit."""

    gpus: int = 8
    """Of all nodes together."""
    nodes: int = 1
    gpu_memory: int | None = None
    memory: int | None = None
    """Of a node."""
    nvme_space: int | None = None
    """Of a node."""

    @property
    def of_node(self) -> int:
        """GPUs of a node."""
        return self.gpus // self.nodes


@dataclass(frozen=True)
class Saving:
    """How fast and how often the job saves."""

    seconds: float
    """In which a checkpoint is written."""
    kept: int = 1
    """Number of full checkpoints that stay on the nodes' NVMe."""
    step: float | None = None
    """Seconds of a training step, in which the swapped bytes must pass; None: not known."""
    passes: int = 1
    """Micro batches of a step."""


@dataclass(frozen=True)
class Need:
    """What one strategy takes. Bytes, of a GPU or of a node."""

    strategy: Strategy
    gpu: float
    """Memory of a GPU."""
    memory: float
    """Memory of a node."""
    swap: int
    """Swap files of a node."""
    read: float
    """From the swap files of a node, in a step."""
    written: float
    capacity: float
    """NVMe of a node: swap files, and the checkpoints that stay."""
    saving: float
    """The same while the next checkpoint is written beside the others."""
    lacks: Sequence[str]
    """What does not fit, in words."""

    def bandwidth(self, step: float) -> float:
        """Bytes per second of a node, if reads and writes of a step of that many seconds follow each other."""
        return (self.read + self.written) / step


def checkpoint_bytes(model: Model) -> tuple[int, int]:
    """Bytes of a checkpoint: of the weights alone, and of the full state."""
    return model.numel * WEIGHTS, model.numel * FULL_STATE


def needs(model: Model, machines: Machines, saving: Saving) -> list[Need]:
    """What each of ``STRATEGIES`` takes."""
    return [_need(model, each, machines, saving) for each in STRATEGIES]


def _need(model: Model, strategy: Strategy, machines: Machines, saving: Saving) -> Need:
    parts = zero.partitions(model, machines.gpus)
    total, low = sum(parts), zero.LOW
    on_nvme, all_offloaded = strategy.offload.startswith("nvme"), strategy.offload in ("cpu", "nvme")
    gathered = min(live(model), model.numel) * low if strategy.stage == 3 else 0
    if strategy.offload == "none":
        gpu = state_bytes(strategy.stage, model.numel, model.numel, machines.gpus, low) + gathered
    else:
        gpu = float(gathered if all_offloaded else gathered + total * low)
    memory = {"cpu": sum(ON_HOST.values()), "none": 0}.get(strategy.offload, ON_HOST["accumulated gradients"]) * total
    swap = zero.nvme_bytes(parts, states=on_nvme, parameters=strategy.offload == "nvme")
    states = zero.nvme_bytes(parts, states=on_nvme, parameters=False)
    parameters = swap - states
    of_node, full = machines.of_node, checkpoint_bytes(model)[1] / machines.nodes
    need = Need(
        strategy=strategy,
        gpu=gpu,
        memory=float(memory * of_node),
        swap=swap * of_node,
        read=float((states + PARAMETER_READS * saving.passes * parameters) * of_node),
        written=float((states + parameters) * of_node),
        capacity=swap * of_node + saving.kept * full,
        saving=swap * of_node + (saving.kept + 1) * full,
        lacks=(),
    )
    return Need(**{**vars(need), "lacks": tuple(_lacks(need, machines))})


def _lacks(need: Need, machines: Machines) -> list[str]:
    lacks = []
    if machines.gpu_memory is not None and need.gpu > machines.gpu_memory:
        lacks.append(f"a GPU: {format_size(need.gpu)} of {format_size(machines.gpu_memory)}")
    if machines.memory is not None and need.memory > machines.memory * MEMORY_SHARE:
        share = f"{MEMORY_SHARE:.0%} of {format_size_binary(machines.memory)}"
        lacks.append(f"memory: {format_size_binary(need.memory)}, more than {share}")
    if machines.nvme_space is not None and need.saving > machines.nvme_space:
        lacks.append(f"NVMe: {format_size(need.saving)} of {format_size(machines.nvme_space)}")
    return lacks


def advice(model: Model, found: Sequence[Need], machines: Machines, saving: Saving) -> list[str]:
    """Sentences that follow from the figures."""
    rate = checkpoint_bytes(model)[1] / saving.seconds / machines.nodes / 1e9
    sentences = [
        f"a full checkpoint within {saving.seconds:.4g} s needs {rate:.3g} GB/s of each node's NVMe if each of "
        f"{machines.nodes} node(s) writes its part"
    ]
    if machines.gpu_memory is not None:
        fits = next((each for each in found if not each.lacks), None)
        if fits is None:
            sentences.append(
                "nothing in the table fits: more GPUs, or a smaller model; ZeRO divides by the number of GPUs"
            )
        else:
            sentences.append(
                f"{fits.strategy.name} is the first that fits, before activations and buffers; those below it move more"
            )
            sentences += _not_compared(fits, machines)
    swapping = next((each for each in found if each.swap), None)
    if swapping is not None and saving.step is not None:
        rate = swapping.bandwidth(saving.step) / 1e9
        sentences.append(
            f"{swapping.strategy.name}: {format_size(swapping.read + swapping.written)} of a node pass in each step; "
            f"{rate:.3g} GB/s hide them behind a step of {saving.step:.4g} s, less makes the step longer"
        )
    return sentences


def _not_compared(need: Need, machines: Machines) -> list[str]:
    """What the strategy takes of a node beside its GPUs, where the node's own size was not given."""
    sizes = []
    if need.memory and machines.memory is None:
        sizes.append(f"a node's memory ({format_size(need.memory)}, `--memory`)")
    if need.swap and machines.nvme_space is None:
        sizes.append(f"its NVMe ({format_size(need.saving)}, `--nvme-space`)")
    return [f"not compared: {', '.join(sizes)}"] if sizes else []


def as_document(model: Model, found: Sequence[Need], machines: Machines, saving: Saving) -> dict[str, Any]:
    """The answer as JSON values: bytes, seconds, bytes per second."""
    weights, full = checkpoint_bytes(model)
    return {
        "model": model.name,
        "source": model.source,
        "parameters": model.numel,
        "active_parameters": active(model),
        "weights_bytes": model.numel * zero.LOW,
        "gradients_bytes": model.numel * zero.LOW,
        "optimizer_bytes": model.numel * zero.STATES * zero.FP32,
        "gpus": machines.gpus,
        "nodes": machines.nodes,
        "checkpoint": {
            "weights_bytes": weights,
            "full_bytes": full,
            "save_seconds": saving.seconds,
            "weights_bandwidth": weights / saving.seconds,
            "full_bandwidth": full / saving.seconds,
            "kept": saving.kept,
        },
        "strategies": [
            {
                "stage": each.strategy.stage,
                "offload": each.strategy.offload,
                "gpu_bytes": each.gpu,
                "node_memory_bytes": each.memory,
                "node_swap_bytes": each.swap,
                "step_read_bytes": each.read,
                "step_written_bytes": each.written,
                "step_bandwidth": each.bandwidth(saving.step) if saving.step else None,
                "node_capacity_bytes": each.capacity,
                "node_capacity_while_saving_bytes": each.saving,
                "lacks": list(each.lacks),
            }
            for each in found
        ],
        "advice": advice(model, found, machines, saving),
    }
