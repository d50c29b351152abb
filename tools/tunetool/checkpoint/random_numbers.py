"""Where a process is in its random numbers: what a checkpoint must have for training to go on as if never stopped."""

from __future__ import annotations

import importlib
import random
import sys
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """The states of this process's generators: of torch, Python, numpy and its GPUs, as far as it uses them.

    Each rank has its own: save it under a key that names the rank.
    """
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (name, tuple(keys.tolist()), *rest)
    if torch.cuda.is_initialized():
        states["cuda"] = [torch.cuda.get_rng_state(device) for device in _gpus()]
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Go on from what ``random_states`` returned. Call it last: to make loaders and models takes random numbers."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        importlib.import_module("numpy").random.set_state(states["numpy"])
    if "cuda" in states:
        for device, state in zip(_gpus(), states["cuda"], strict=False):
            torch.cuda.set_rng_state(state, device)


def _gpus() -> list[int]:
    """The process's own first: where a job resumes on other nodes, a rank's GPU may have another number."""
    count = torch.cuda.device_count()
    return [(torch.cuda.current_device() + each) % count for each in range(count)]
