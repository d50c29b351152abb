"""Hugging Face's transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tunetool.bench.loading.engines.base import Loader, Place, Tensors


class Transformers(Loader):
    """``from_pretrained`` with ``device_map``, by the class that the model's config.json names."""

    def load(self, directory: Path, place: Place, options: Mapping[str, Any]) -> Tensors:
        """See ``Loader``."""
        library = import_module("transformers")
        (name,) = json.loads((directory / "config.json").read_text())["architectures"]
        model = getattr(library, name).from_pretrained(directory, dtype="auto", device_map=str(place.device))
        return dict(model.named_parameters())
