"""Small .safetensors files."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path


def safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    """Write a file with these tensors in bf16, all zeros."""
    listed, offset = {}, 0
    for name, shape in shapes.items():
        stop = offset + 2 * math.prod(shape)
        listed[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    header = json.dumps({"__metadata__": {"format": "pt"}, **listed}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(offset))
