"""The checksums that a manifest can name."""

from __future__ import annotations

import hashlib
from typing import Literal, Protocol

from tunetool.stage.pieces import PIECE_BYTES

Checksum = Literal["xxh3_64", "sha256"]
DEFAULT: Checksum = "xxh3_64"


class Hasher(Protocol):
    """As hashlib has it."""

    def update(self, data: memoryview, /) -> None:
        """More bytes."""

    def hexdigest(self) -> str:
        """Of all bytes so far."""


def hasher(kind: Checksum) -> Hasher:
    """A new one. Both leave the interpreter to other threads while they work on large buffers."""
    if kind == "sha256":
        return hashlib.sha256()
    # Not at the top: `tunetool --help` and a refused call need none.
    import xxhash  # noqa: PLC0415  (not for --help)

    xxh3: Hasher = xxhash.xxh3_64()
    return xxh3


def piece_bytes(kind: Checksum) -> int | None:
    """What one digest covers. None: the whole file, so that `sha256sum` and what a hub publishes say the same."""
    return None if kind == "sha256" else PIECE_BYTES
