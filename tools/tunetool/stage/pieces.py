"""Cuts a copy into jobs for many threads, and sums their bytes by a checksum that a manifest can name. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

PIECE_BYTES = 64 * 2**20
"""Bytes of a large file that one thread takes at a time, and that one xxh3_64 digest covers."""
BATCH_FILES = 64


class Piece(NamedTuple):
    """Bytes of one file: ``file`` is its index; ``number`` counts the file's pieces of ``of``."""

    file: int
    number: int
    of: int
    offset: int
    length: int


def cut(sizes: Sequence[int], piece_bytes: int | None) -> list[list[Piece]]:
    """Jobs, each for one thread at a time: a piece of a big file, or a batch of small files.

    First pieces of all big files come first, then second ones: writers of one file share its inode's lock (a tmpfs
    takes about 3.5 GB/s into one file and several times that into several). Small files come last, to fill the ends.
    ``None`` leaves files whole, for checksums that others print of the whole file.
    """
    big: list[Piece] = []
    small: list[Piece] = []
    for index, size in enumerate(sizes):
        if piece_bytes is None or size <= piece_bytes:
            (small if size < PIECE_BYTES else big).append(Piece(index, 0, 1, 0, size))
            continue
        of, step = -(-size // piece_bytes), piece_bytes
        pieces = [Piece(index, number, of, number * step, min(step, size - number * step)) for number in range(of)]
        big.extend(pieces)
    # The longest pieces first, so that no thread still works on one when the others are done.
    big.sort(key=lambda piece: (piece.number, -piece.length, piece.file))
    return [*([piece] for piece in big), *_batches(small)]


def _batches(small: Sequence[Piece]) -> list[list[Piece]]:
    batches: list[list[Piece]] = []
    filled = 0
    for piece in small:
        if not batches or len(batches[-1]) >= BATCH_FILES or filled + piece.length > PIECE_BYTES:
            batches.append([])
            filled = 0
        batches[-1].append(piece)
        filled += piece.length
    return batches


Checksum = Literal["xxh3_64", "sha256"]
DEFAULT_CHECKSUM: Checksum = "xxh3_64"


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
