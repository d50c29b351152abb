"""The file of experts: random bytes, and in each page which expert and which page it is."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

from tunetool.bench.experts.child import PAGE, stamp

DATA = "experts.data"
_PIECE = 4 << 20


def block_bytes(expert_bytes: int) -> int:
    """Bytes of an expert in the file: whole pages, as direct I/O asks."""
    return -(-expert_bytes // PAGE) * PAGE


def write(path: Path, experts: int, block: int, seed: int, tick: Callable[[], None]) -> None:
    """Write and sync ``experts`` blocks. Raises ``OSError`` before the first byte where they do not fit."""
    piece = bytearray(random.Random(seed).randbytes(min(block, _PIECE)))  # noqa: S311  (contents, no secret)
    with path.open("xb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, experts * block)
        for expert in range(experts):
            for start in range(0, block, _PIECE):
                part = piece[: block - start]
                stamp(part, expert, start // PAGE)
                _write_all(file.fileno(), part)
                tick()
        os.fsync(file.fileno())


def _write_all(handle: int, part: bytearray) -> None:
    with memoryview(part) as memory:
        done = 0
        while done < len(part):
            done += os.write(handle, memory[done:])
