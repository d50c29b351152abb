"""Writes random weights to .safetensors files, piece by piece with all cores, so that it needs little memory.

The bytes do not compress, and depend only on the seed and the tensor names, not on threads or files.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from tunetool.advise.shapes import Tensor
from tunetool.ctrl_c import Threads
from tunetool.loading.safetensors_files import INDEX, SINGLE

BYTES_PER_ELEMENT = 2
"""Of bfloat16, the dtype in which Qwen2.5-VL is published."""
PIECE = 4 << 20
"""Elements that one thread generates at a time."""
_EMBEDDING_STD = 0.02
"""As Qwen2.5-VL's ``initializer_range``; a tied output layer then has logits of about 1 too."""


@dataclass(frozen=True)
class Shard:
    """One file: its name, its header bytes, and its tensors, each with its byte offset."""

    file: str
    header: bytes
    tensors: tuple[tuple[Tensor, int], ...]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(tensor.numel for tensor, _ in self.tensors) * BYTES_PER_ELEMENT


def lay_out(tensors: Sequence[Tensor], shard_bytes: int) -> list[Shard]:
    """The files in order, each with at most ``shard_bytes`` of tensors or a single tensor, named as in transformers."""
    groups: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = tensor.numel * BYTES_PER_ELEMENT
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    if len(groups) == 1:
        return [_shard(SINGLE, groups[0])]
    return [
        _shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group) for number, group in enumerate(groups, 1)
    ]


def _shard(file: str, tensors: Sequence[Tensor]) -> Shard:
    """See https://huggingface.co/docs/safetensors: length of the header (8 bytes), header, the tensors' bytes."""
    listed: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    placed, at = [], 0
    for tensor in tensors:
        placed.append((tensor, at))
        stop = at + tensor.numel * BYTES_PER_ELEMENT
        listed[tensor.name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(listed, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return Shard(file, header, tuple((tensor, len(header) + begin) for tensor, begin in placed))


def spread(tensor: Tensor, layers: Mapping[str, int]) -> float | None:
    """Standard deviation of the random values; None for vectors (norms are 1, biases 0).

    1 / sqrt(inputs) keeps the scale of what flows through, whatever the size; what is added to the residual stream is
    divided by sqrt(2 x layers) more, as for GPT-2 (Radford et al. 2019, 2.3). ``layers``: by first part of the name.
    """
    if len(tensor.shape) < 2:
        return None
    if "embed_tokens" in tensor.name:
        return _EMBEDDING_STD
    std = 1 / math.sqrt(math.prod(tensor.shape[1:]))
    residual = tensor.layer is not None and tensor.name.endswith(
        ("o_proj.weight", "attn.proj.weight", "down_proj.weight")
    )
    return std / math.sqrt(2 * layers[tensor.name.partition(".")[0]]) if residual else std


def layers_of(tensors: Sequence[Tensor]) -> dict[str, int]:
    """Number of layers, by first part of the tensors' names: a model may have several towers."""
    layers: dict[str, int] = {}
    for tensor in tensors:
        if tensor.layer is not None:
            tower = tensor.name.partition(".")[0]
            layers[tower] = max(layers.get(tower, 0), int(tensor.layer) + 1)
    return layers


def write(directory: Path, tensors: Sequence[Tensor], seed: int, shard_bytes: int, tick: Callable[[int], None]) -> None:
    """Write the files and, if there are several, their index. ``tick`` gets the number of bytes written so far.

    Raises ``OSError``.
    """
    shards = lay_out(tensors, shard_bytes)
    layers = layers_of(tensors)

    def write_piece(piece: tuple[int, Tensor, int, int, int]) -> int:
        handle, tensor, at, first, count = piece
        data = memoryview(draw(tensor, seed, spread(tensor, layers), first, count)).cast("B")
        done = 0
        while done < len(data):
            done += os.pwrite(handle, data[done:], at + first * BYTES_PER_ELEMENT + done)
        return done

    cores = len(os.sched_getaffinity(0))
    with ExitStack() as stack, Threads(cores, "tunetool-weights") as threads:
        queues = []
        for shard in shards:
            handle = os.open(directory / shard.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            stack.callback(os.close, handle)
            # A tmpfs with `huge=within_size` gives huge pages to nothing beyond the size.
            os.ftruncate(handle, shard.size)
            os.pwrite(handle, shard.header, 0)
            queues.append([(handle, *piece) for piece in _pieces(shard)])
        # The files in turn: one inode of a tmpfs takes 3.5 GB/s, several take several times that.
        pieces = (piece for piece in chain(*zip_longest(*queues)) if piece is not None)
        written = 0
        for count in threads.each(write_piece, pieces):
            written += count
            tick(written)
    if len(shards) > 1:
        _write_index(directory, shards)


def _pieces(shard: Shard) -> Iterator[tuple[Tensor, int, int, int]]:
    for tensor, at in shard.tensors:
        for first in range(0, tensor.numel, PIECE):
            yield tensor, at, first, min(PIECE, tensor.numel - first)


def draw(tensor: Tensor, seed: int, std: float | None, first: int, count: int) -> Any:
    """``count`` random elements from index ``first`` on, as bfloat16 bits: uint16, shape (count,)."""
    if std is None:
        is_bias = tensor.name.endswith(".bias")
        return np.full(count, 0 if is_bias else _ONE, dtype="<u2")
    source = np.random.SFC64(np.random.SeedSequence([seed, zlib.crc32(tensor.name.encode()), first]))
    values = np.random.Generator(source).standard_normal(count, dtype=np.float32)
    values *= np.float32(std)
    # The upper half of a float32 is the bfloat16 below it in magnitude.
    return np.ascontiguousarray(values.astype("<f4", copy=False).view("<u2")[1::2])


_ONE = 0x3F80


def _write_index(directory: Path, shards: Sequence[Shard]) -> None:
    placed = {tensor.name: shard.file for shard in shards for tensor, _ in shard.tensors}
    total = sum(tensor.numel for shard in shards for tensor, _ in shard.tensors) * BYTES_PER_ELEMENT
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    (directory / INDEX).write_text(json.dumps(document, indent=2) + "\n")
