"""The loaders that are compared, by name, and what installs them. Importing this imports none of them, nor torch.

A loader is one file here with a class of ``base.Loader``, a line of ``ENGINES``, and a row of the table in
docs/guides/bench-loading.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from tunetool.bench.versions import Versions

if TYPE_CHECKING:
    from tunetool.bench.loading.engines.base import Loader

DIRECT = "direct"
"""``tunetool.loading``."""
PLAIN = "plain"
"""What all of them must give; it is not compared."""


@dataclass(frozen=True)
class Engine:
    """A loader: ``FILE.CLASS`` in this package, the module that it imports, and the packages of the index that install
    that."""

    path: str
    module: str
    packages: str
    needs_gpu: bool = False
    renames: bool = False
    """Whether its tensors have other names than the files say."""
    versions: Versions | None = None
    """Those that take our call; None: no version is known that does not."""

    def unavailable(self, gpu: bool) -> str | None:
        """Why it cannot run here, with what to do; None if it can."""
        if importlib.util.find_spec(self.module.partition(".")[0]) is None:
            return f"not installed: {sys.executable} -m pip install {self.packages}"
        if self.versions is not None and (why := self.versions.unsuitable()):
            return f"{why}: {sys.executable} -m pip install {self.packages}"
        return "it needs a GPU" if self.needs_gpu and not gpu else None

    def make(self) -> Loader:
        """The loader. Imports torch, and not yet its library."""
        file, _, kind = self.path.partition(".")
        return cast("Loader", getattr(importlib.import_module(f"{__name__}.{file}"), kind)())


ENGINES: Mapping[str, Engine] = {
    DIRECT: Engine("direct.Direct", "tunetool.loading", "tunetool"),
    "instanttensor": Engine("instanttensor.InstantTensor", "instanttensor", "instanttensor", needs_gpu=True),
    "fastsafetensors": Engine("fastsafetensors.FastSafetensors", "fastsafetensors", "fastsafetensors"),
    # Up to 0.16.1 `stream_files` has no `owned`, and what it yields is overwritten.
    "runai": Engine(
        "runai.RunAi",
        "runai_model_streamer",
        "'runai-model-streamer>=0.17'",
        versions=Versions("runai-model-streamer", "0.17"),
    ),
    "kvikio": Engine("kvikio.KvikIo", "kvikio", "kvikio-cu12", needs_gpu=True),
    "safetensors": Engine("safetensors.Safetensors", "safetensors", "safetensors"),
    # Up to 4.55 `from_pretrained` calls its `dtype` `torch_dtype`.
    "transformers": Engine(
        "transformers.Transformers",
        "transformers",
        "'transformers>=4.56' accelerate",
        renames=True,
        versions=Versions("transformers", "4.56"),
    ),
}
"""kvikio has a package for each CUDA: kvikio-cu13 for CUDA 13."""
LOADERS: Mapping[str, Engine] = {**ENGINES, PLAIN: Engine("plain.Plain", "torch", "torch")}
