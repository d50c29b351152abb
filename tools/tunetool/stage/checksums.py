"""The checksums that a manifest can name."""

from __future__ import annotations

import hashlib
from typing import Literal, Protocol

from tunetool.stage.pieces import PIECE_BYTES

Checksum = Literal["xxh3_64", "sha256"]
DEFAULT: Checksum = "xxh3_64"


class Hasher(Protocol):
    """The interface of hashlib's hash objects."""

    def update(self, data: memoryview, /) -> None:
        """Add bytes."""

    def hexdigest(self) -> str:
        """The checksum of all bytes so far, in hexadecimal digits."""


def hasher(kind: Checksum) -> Hasher:
    """A new hash object. Both kinds release the interpreter's lock while they hash large buffers."""
    if kind == "sha256":
        return hashlib.sha256()
    # Not at the top: `tunetool --help` and a refused call need none.
    import xxhash  # noqa: PLC0415  (not for --help)

    xxh3: Hasher = xxhash.xxh3_64()
    return xxh3


def digest_of(kind: Checksum, data: memoryview) -> str:
    """The checksum of ``data``, in hexadecimal digits."""
    if kind == "sha256":
        return hashlib.sha256(data).hexdigest()
    import xxhash  # noqa: PLC0415  (as above)

    return str(xxhash.xxh3_64_hexdigest(data))


def piece_bytes(kind: Checksum) -> int | None:
    """Bytes that one digest covers. None: the whole file, so that it equals `sha256sum` and published checksums."""
    return None if kind == "sha256" else PIECE_BYTES
