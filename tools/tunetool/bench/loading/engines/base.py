"""The interface of every loader of the benchmark: bring all tensors of a model to a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
"""By name."""


@dataclass(frozen=True)
class Place:
    """Where the tensors go, and the group of the processes that load at the same time; None for one alone."""

    device: torch.device
    group: Any = None


class Loader:
    """One way to load. Its file imports the library where it loads, since a first load includes that import."""

    def load(self, directory: Path, place: Place, options: Mapping[str, Any]) -> Tensors:
        """Every tensor of the model, on the device. ``options``: settings of the library."""
        raise NotImplementedError

    def free(self) -> None:
        """Release what is behind the tensors, once all their names are gone: most need nothing more."""


def files(directory: Path) -> list[str]:
    """The model's files, in their order."""
    return [str(path) for path in sorted(directory.glob("*.safetensors"))]
