"""Small .safetensors files."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from tunetool.safetensors_header import BITS


def safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    """Write a file with these tensors in bf16, all zeros."""
    listed, offset = {}, 0
    for name, shape in shapes.items():
        stop = offset + 2 * math.prod(shape)
        listed[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    header = json.dumps({"__metadata__": {"format": "pt"}, **listed}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(offset))


def described(
    path: Path, tensors: Mapping[str, tuple[str, Sequence[int]]], data: Mapping[str, bytes] | None = None
) -> None:
    """Write a file with tensors of these dtypes and shapes: zeros that take no room, but for those in ``data``."""
    listed, offset, at = {}, 0, {}
    for name, (dtype, shape) in tensors.items():
        stop = offset + BITS[dtype] * math.prod(shape) // 8
        listed[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
        at[name], offset = offset, stop
    header = json.dumps(listed).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name, content in (data or {}).items():
            file.seek(8 + len(header) + at[name])
            file.write(content)
        file.truncate(8 + len(header) + offset)
