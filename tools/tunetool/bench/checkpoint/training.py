"""A small training loop with saves: its additional time is the cost of a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tunetool.advise.precision import choose
from tunetool.bench.checkpoint.engines import tensors
from tunetool.bench.checkpoint.engines.base import Engine, Pending, State
from tunetool.training.rank.gpu_reading import of_gpu

_SIZES = {"cpu": 256, "cuda": 4096}
"""Size of the square matrices that a step multiplies, each milliseconds of work."""
_CALIBRATION_SECONDS = 0.5


@dataclass(frozen=True)
class Run:
    """Times of one loop."""

    began: float
    ended: float
    """Time of the last step's end; a save may still be in progress. All three are on the monotonic clock."""
    finished: float
    """Time when the last save was durable."""
    held: list[float]
    """Seconds that each save held the loop, waiting for the save before included."""


@dataclass(frozen=True)
class Loop:
    """Steps of matrix products, on the device of the state."""

    device: str
    products: int
    """Matrix products of one step."""
    step_seconds: float
    """Seconds of one step, as calibrated."""
    barrier: Callable[[], None]

    def run(self, state: State, engine: Engine | None, steps: int, every: int, directories: Sequence[Path]) -> Run:
        """``steps`` steps that change the state; after each ``every`` of them, save to the next of ``directories``."""
        left, right = _matrices(self.device)
        weights = [tensors.local(tensor).reshape(-1) for tensor in state.values()]
        waiting: Pending | None = None
        held: list[float] = []
        targets = iter(directories)
        _synchronize(self.device)
        self.barrier()
        began = time.monotonic()
        for step in range(1, steps + 1):
            for _ in range(self.products):
                torch.mm(left, right)
            # An update of a part: a step that changed all of a state would measure memory, not saves.
            weights[step % len(weights)][:1024] += 1
            _synchronize(self.device)
            if engine is not None and step % every == 0 and (directory := next(targets, None)) is not None:
                self.barrier()
                before = time.monotonic()
                if waiting is not None:
                    waiting.wait()
                waiting = engine.save(state, directory)
                if self.device == "cuda":
                    torch.cuda.current_stream().synchronize()
                held.append(time.monotonic() - before)
        self.barrier()
        ended = time.monotonic()
        if waiting is not None:
            waiting.wait()
        return Run(began, ended, time.monotonic(), held)


def calibrated(device: str, step_seconds: float, barrier: Callable[[], None]) -> Loop:
    """A loop whose step takes about ``step_seconds`` on this device while nothing else runs."""
    left, right = _matrices(device)
    torch.mm(left, right)
    _synchronize(device)
    barrier()
    began, products = time.monotonic(), 0
    while time.monotonic() - began < _CALIBRATION_SECONDS:
        torch.mm(left, right)
        products += 1
        if products % 8 == 0:
            _synchronize(device)
    _synchronize(device)
    each = (time.monotonic() - began) / products
    count = max(1, round(step_seconds / each))
    return Loop(device, count, count * each, barrier)


def dtype_of(device: str) -> torch.dtype:
    """What a training computes in on this device: where bf16 is emulated, a step of it would be no GPU's work."""
    capabilities = [of_gpu(torch.cuda.current_device())] if device == "cuda" else []
    dtype: torch.dtype = getattr(torch, choose("auto", capabilities).dtype)
    return dtype


def _matrices(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    size, dtype = _SIZES[device], dtype_of(device)
    generator = torch.Generator(device=device).manual_seed(1)
    return (
        torch.randn(size, size, dtype=dtype, device=device, generator=generator),
        torch.randn(size, size, dtype=dtype, device=device, generator=generator),
    )


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
