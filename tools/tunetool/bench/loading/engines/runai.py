"""Run:ai Model Streamer."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tunetool.bench.loading.engines.base import Loader, Place, Tensors, files


class RunAi(Loader):
    """``SafetensorsStreamer`` over all files."""

    def load(self, directory: Path, place: Place, options: Mapping[str, Any]) -> Tensors:
        """See ``Loader``."""
        library = import_module("runai_model_streamer")
        tensors: Tensors = {}
        with library.SafetensorsStreamer() as streamer:
            # What it yields is the caller's to keep, from 0.17 on.
            streamer.stream_files(files(directory), device=str(place.device), owned=True)
            tensors.update(streamer.get_tensors())
        return tensors
