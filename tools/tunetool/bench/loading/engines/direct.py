"""tunetool.loading."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from tunetool.bench.loading.engines.base import Loader, Place, Tensors


class Direct(Loader):
    """``load``; several processes read each byte once."""

    def load(self, directory: Path, place: Place, options: Mapping[str, Any]) -> Tensors:
        """See ``Loader``."""
        library = import_module("tunetool.loading")
        return cast(Tensors, library.load(directory, place.device, group=place.group, **options))
