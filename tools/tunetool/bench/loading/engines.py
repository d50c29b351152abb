"""The loaders that are compared, by name, and what installs them. Importing this imports none of them, nor torch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass

DIRECT = "direct"
"""``tunetool.loading``."""


@dataclass(frozen=True)
class Engine:
    """A loader: the module that is imported, and the packages of the index that install it."""

    module: str
    packages: str
    needs_gpu: bool = False
    renames: bool = False
    """Whether its tensors have other names than the files say."""

    def unavailable(self, gpu: bool) -> str | None:
        """Why it cannot run here, with what to do; None if it can."""
        if importlib.util.find_spec(self.module.partition(".")[0]) is None:
            return f"not installed: {sys.executable} -m pip install {self.packages}"
        return "it needs a GPU" if self.needs_gpu and not gpu else None


ENGINES: Mapping[str, Engine] = {
    DIRECT: Engine("tunetool.loading", "tunetool"),
    "instanttensor": Engine("instanttensor", "instanttensor", needs_gpu=True),
    "fastsafetensors": Engine("fastsafetensors", "fastsafetensors"),
    "runai": Engine("runai_model_streamer", "'runai-model-streamer>=0.17'"),
    "kvikio": Engine("kvikio", "kvikio-cu12", needs_gpu=True),
    "safetensors": Engine("safetensors", "safetensors"),
    "transformers": Engine("transformers", "transformers accelerate", renames=True),
}
"""kvikio has a package for each CUDA: kvikio-cu13 for CUDA 13."""
