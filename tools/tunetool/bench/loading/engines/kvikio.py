"""KvikIO."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tunetool.bench.loading.engines.base import Loader, Place, Tensors


class KvikIo(Loader):
    """``CuFile.pread`` of each tensor, all at the same time."""

    def load(self, directory: Path, place: Place, options: Mapping[str, Any]) -> Tensors:
        """See ``Loader``."""
        library = import_module("kvikio")
        listing = import_module("tunetool.loading.safetensors_files").list_tensors(directory)
        opened = {name: library.CuFile(str(directory / name), "r") for name in listing.files}
        tensors, waiting = {}, []
        for name, stored in listing.tensors.items():
            tensors[name] = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device=place.device)
            if stored.length:
                memory = tensors[name].reshape(-1).view(torch.uint8)
                waiting.append(opened[stored.file].pread(memory, stored.length, stored.start))
        for each in waiting:
            each.get()
        for file in opened.values():
            file.close()
        return tensors
