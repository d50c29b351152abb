"""fastsafetensors, without GPUDirect Storage."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tunetool.bench.loading.engines.base import Loader, Place, Tensors, files


class FastSafetensors(Loader):
    """``SafeTensorsFileLoader``, each process by itself. The tensors lie in its buffer."""

    def load(self, directory: Path, place: Place, options: Mapping[str, Any]) -> Tensors:
        """See ``Loader``."""
        library = import_module("fastsafetensors")
        self._loader = library.SafeTensorsFileLoader(library.SingleGroup(), place.device, nogds=True)
        self._loader.add_filenames({0: files(directory)})
        self._buffer = self._loader.copy_files_to_device()
        return {name: self._buffer.get_tensor(name) for name in self._loader.get_keys()}

    def free(self) -> None:
        """See ``Loader``."""
        self._buffer.close()
        self._loader.close()
