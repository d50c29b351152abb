"""Compares stored tensors that a module has as one: two names of a tied parameter, two that ``rename`` calls alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tunetool.checkpoint.fetch import Want
from tunetool.checkpoint.raw_bytes import Plain
from tunetool.loading.fill import Filling, Reading
from tunetool.loading.module_weights import Same
from tunetool.loading.safetensors_files import Listing, Stored

PIECE_BYTES = 64 << 20
"""Of each of the two in memory at a time."""


def check_same(listing: Listing, pairs: Sequence[Same], reading: Reading) -> None:
    """Raises ``DoesNotFit`` for the first pair whose bytes differ, ``CannotJudge`` where they cannot be read."""
    if not pairs:
        return
    filling = Filling(listing, 0, reading._replace(progress=None))
    try:
        for pair in pairs:
            for at in range(0, pair.first.length, PIECE_BYTES):
                count = min(PIECE_BYTES, pair.first.length - at)
                both = torch.empty((2, count), dtype=torch.uint8)
                wants = [_bytes_of(tensor, at, both[row]) for row, tensor in enumerate(pair)]
                filling.read(wants, both.device)
                if not torch.equal(both[0], both[1]):
                    raise pair.differ(listing)
    finally:
        filling.files.close()


def _bytes_of(tensor: Stored, at: int, target: torch.Tensor) -> Want:
    count = len(target)
    return Want(
        tensor.name, tensor.file, tensor.start + at, Plain(0, count, "uint8", (count,), None), (0,), (count,), target
    )
