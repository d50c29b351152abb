"""Plain reads: what every loader must give."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tunetool.bench.loading.engines.base import Loader, Place, Tensors, files

_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "I64": "int64", "U8": "uint8"}


class Plain(Loader):
    """Every tensor by ``read``, with nothing of any loader."""

    def load(self, directory: Path, place: Place, options: Mapping[str, Any]) -> Tensors:
        """See ``Loader``."""
        tensors = {}
        for path in files(directory):
            with Path(path).open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
                start = file.tell()
                for name, entry in header.items():
                    if name != "__metadata__":
                        begin, end = entry["data_offsets"]
                        file.seek(start + begin)
                        memory = torch.frombuffer(
                            bytearray(file.read(end - begin)), dtype=getattr(torch, _NAMES[entry["dtype"]])
                        )
                        tensors[name] = memory.reshape(entry["shape"]).to(place.device)
        return tensors
