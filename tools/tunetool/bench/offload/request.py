"""The request of `bench offload`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tunetool.advise.precision import Asked
from tunetool.bench.defaults import CHECKPOINT_ROUNDS, OFFLOAD_TOKENS
from tunetool.measure.session import Run
from tunetool.tune.settings import AioSettings

KIND = "bench.offload"
WARM_UPS = 2
"""Steps before the rounds: in the first two ZeRO-3 learns the order of the modules, and Adam makes its states."""

Parameters = Literal["device", "nvme"]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class Request:
    """The options of the call."""

    model: str
    target: Path | None = None
    """Directory on drives."""
    memory_target: Path | None = None
    """Directory in memory."""
    dram: bool = True
    """Whether the same is also trained with everything in DRAM, whose losses are the reference."""
    parameters: Parameters = "device"
    """Where parameters are: in the memory of the device, or swapped beside the optimizer's states."""
    tuned: AioSettings | None = None
    """The settings that are compared with DeepSpeed's default; None: the default alone."""
    ranks: int = 1
    device: Device = "auto"
    precision: Asked = "auto"
    tokens: int = OFFLOAD_TOKENS
    """Of a sequence."""
    micro_batch: int = 1
    """Sequences of each rank in a step."""
    rounds: int = CHECKPOINT_ROUNDS
    seed: int = 0
    run: Run = field(default_factory=Run)
