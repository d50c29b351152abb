"""States that follow from a seed, so that each process knows what another one saved. Imports torch, not tunetool."""

from __future__ import annotations

from typing import Any

import torch


def state(seed: int, megabytes: float = 0.0) -> dict[str, Any]:
    """Every kind of tensor that a checkpoint can hold, and objects. ``megabytes``: size of one additional tensor."""
    made = torch.Generator().manual_seed(seed)
    whole = torch.randn(64, 48, generator=made)
    return {
        "model": {
            "weight": torch.randn(301, 257, generator=made),
            "half": torch.randn(33, 65, generator=made).bfloat16(),
            "quarter": torch.randn(300, generator=made).to(torch.float8_e4m3fn),
            "small": torch.randint(-128, 127, (17, 3), generator=made, dtype=torch.int8),
            "counts": torch.randint(0, 2**40, (5,), generator=made),
            "unsigned": torch.randint(0, 2**15, (9,), generator=made).to(torch.uint16),
            "mask": torch.rand(77, generator=made) > 0.5,
            "waves": torch.randn(5, 7, dtype=torch.complex64, generator=made),
            "scalar": torch.tensor(float(seed)),
            "empty": torch.empty(0, 4),
            "turned": torch.randn(40, 50, generator=made).t(),
            "tied": whole,
            "part_of_tied": whole[3:9, ::2],
            # Eight bytes at a time, which is eight times as fast.
            "large": torch.randint(-(2**63), 2**63 - 1, (int(megabytes * 2**20) // 64, 8), generator=made).view(
                torch.uint8
            ),
        },
        "optimizer": [torch.randn(7, generator=made), {"lr": 0.1 * seed, "betas": (0.9, 0.95)}],
        "step": seed,
    }


def blank(value: Any) -> Any:
    """The same layout with other values, for a load to fill."""
    if isinstance(value, dict):
        return {key: blank(part) for key, part in value.items()}
    if isinstance(value, list):
        return [blank(part) for part in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def difference(expected: Any, actual: Any, name: str = "state") -> str | None:
    """Name of the first value whose bits differ; None if all are equal."""
    if isinstance(expected, (dict, list)):
        keys = list(expected) if isinstance(expected, dict) else range(len(expected))
        differences = (difference(expected[key], actual[key], f"{name}.{key}") for key in keys)
        return next((line for line in differences if line), None)
    if not isinstance(expected, torch.Tensor):
        return None if expected == actual else f"{name}: {expected} became {actual}"
    same = (
        expected.dtype == actual.dtype
        and expected.shape == actual.shape
        and torch.equal(_bits(expected), _bits(actual))
    )
    return None if same else f"{name}: {expected.dtype} {list(expected.shape)} came back otherwise"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
