"""The safetensors library."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tunetool.bench.loading.engines.base import Loader, Place, Tensors, files


class Safetensors(Loader):
    """``load_file`` of each file."""

    def load(self, directory: Path, place: Place, options: Mapping[str, Any]) -> Tensors:
        """See ``Loader``."""
        library = import_module("safetensors.torch")
        tensors: Tensors = {}
        for file in files(directory):
            tensors.update(library.load_file(file, device=str(place.device)))
        if place.device.type == "cpu":  # it maps the file, and reads nothing yet
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        return tensors
