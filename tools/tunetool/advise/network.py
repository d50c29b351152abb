"""What a network between nodes costs a training step under each ZeRO stage, before anything is bought or run. Pure.

Bytes over bandwidth, without latency and without overlap: a lower bound of communication, and an upper bound of what of
it the step waits for. ``tunetool.advise.communication`` says what is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunetool.advise.communication import Backend, Module, Zero, parameters, trained
from tunetool.advise.zero_steps import traffic

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class WhatIf:
    """The question: this model on so many GPUs, joined by links of this bandwidth."""

    modules: Sequence[Module]
    gpus: int
    bandwidth: float
    """Bytes per second of a node's link, in each direction."""
    element_bytes: int = 2
    backend: Backend = "nccl"
    compute: float | None = None
    """Seconds of one GPU's step; None: not known."""
    zero: Mapping[int, Zero] | None = None
    """Settings by stage; None: DeepSpeed's defaults."""


@dataclass(frozen=True)
class Answer:
    """One stage."""

    stage: int
    sent: float
    """Bytes that each rank sends in a step, and that cross a node's link in each direction."""
    calls: int
    seconds: float
    """On the link, if nothing of it is hidden."""
    even: float
    """Seconds of one GPU's step below which all GPUs together are slower than one."""
    hidden_at: float | None
    """Bandwidth from which computation could hide all of it; None where the step's time is not known."""
    relative: tuple[float, float] | None
    """The time for the same samples over that of one GPU: all hidden that can be, and nothing hidden."""


def answers(asked: WhatIf) -> list[Answer]:
    """Of each stage."""
    return [_answer(asked, stage) for stage in STAGES]


def _answer(asked: WhatIf, stage: int) -> Answer:
    zero = (asked.zero or {}).get(stage) or Zero(stage)
    moved = traffic(asked.modules, zero, asked.gpus, asked.element_bytes, asked.backend)
    seconds = moved.sent / asked.bandwidth
    compute, gpus = asked.compute, asked.gpus
    return Answer(
        stage=stage,
        sent=moved.sent,
        calls=len(moved.calls),
        seconds=seconds,
        even=seconds / (gpus - 1) if gpus > 1 else 0.0,
        hidden_at=moved.sent / compute if compute else None,
        relative=(max(compute, seconds) / compute / gpus, (compute + seconds) / compute / gpus) if compute else None,
    )


def as_document(asked: WhatIf, model: str, stages: Sequence[Answer]) -> dict[str, Any]:
    """The answer as JSON values; bytes, seconds and bytes per second."""
    return {
        "model": model,
        "parameters": sum(each.numel for each in parameters(asked.modules)),
        "trained": sum(each.numel for each in trained(asked.modules)),
        "gpus": asked.gpus,
        "bandwidth": asked.bandwidth,
        "compute_seconds": asked.compute,
        "stages": [
            {
                "stage": each.stage,
                "sent_bytes": each.sent,
                "collectives": each.calls,
                "link_seconds": each.seconds,
                "even_seconds": each.even,
                "hiding_bandwidth": each.hidden_at,
                "epoch_over_one_gpu": list(each.relative) if each.relative else None,
            }
            for each in stages
        ],
    }
