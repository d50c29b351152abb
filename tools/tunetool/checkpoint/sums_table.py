"""The table of checksums at the end of a data file of ``DirectWriter``: the sums of all blocks of its tensors.

It is rows, one for each tensor, the sums in the same order, zeros, and a footer of ``FOOTER_BYTES``. A row has the
place of the raw bytes in the file, their length, and a hash of the tensor's name and offset. The footer has where the
table begins, the numbers of rows and of sums, a digest of these, and a seal: a digest of that and of the save's token.
So a file of another save and the bytes of another tensor are noticed, whatever `.metadata` says. All numbers have 64
bits, little-endian. torch's reader looks at nothing of it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tunetool.checkpoint.checksums import SUM_BYTES, number_of, number_of_blocks
from tunetool.errors import CannotJudge

if TYPE_CHECKING:
    from tunetool.checkpoint.source import Files

_MAGIC = b"tunetool sums 1\n"
_FOOTER = struct.Struct("<5Q16s")
FOOTER_BYTES = _FOOTER.size
_ROW_BYTES = 24
_AT_ONCE = 64 << 10
"""Bytes that are read at the end of a file: most tables have fewer."""
_ANOTHER = "load another checkpoint, and look at the health of the drives: `tunetool verify`"


class Row(NamedTuple):
    """What a table has of one tensor."""

    length: int
    key: int
    sums: bytes


def key_of(tensor: str, offset: Sequence[int] | None) -> int:
    """The hash of a name, and of an offset in the tensor."""
    return number_of((tensor + _text_of(tuple(offset or ()))).encode("utf-8", "surrogatepass"))


@lru_cache(4096)
def _text_of(offset: tuple[int, ...]) -> str:
    return "".join(f"\0{at}" for at in offset)


def bytes_of(tensors: int, sums: int) -> int:
    """The size of the table of so many tensors with so many sums."""
    return _ROW_BYTES * tensors + SUM_BYTES * sums + FOOTER_BYTES


def rows(places: Any, lengths: Any, keys: Sequence[int]) -> bytes:
    """The rows of a table. ``places``: of the raw bytes."""
    made: bytes = np.column_stack([np.array(each, "<u8") for each in (places, lengths, keys)]).tobytes()
    return made


def table(rows: bytes, sums: bytes, save: str, where: tuple[int, int]) -> bytes:
    """The bytes of the range ``where`` of the file: a table, and zeros in it."""
    start, stop = where
    digest = number_of(rows + sums)
    footer = _FOOTER.pack(start, len(rows) // _ROW_BYTES, len(sums) // SUM_BYTES, digest, _seal(digest, save), _MAGIC)
    return (rows + sums).ljust(stop - start - FOOTER_BYTES, b"\0") + footer


def _seal(digest: int, save: str | None) -> int:
    return number_of(b"%016x%s" % (digest, (save or "").encode()))


class Table:
    """The table of a file. ``rows`` and ``sums``: as they are in the file."""

    def __init__(self, rows: bytes, sums: bytes) -> None:
        columns = np.frombuffer(rows, "<u8").reshape(-1, 3).tolist()
        self._rows: dict[int, tuple[int, int, int, int]] = {}
        """By place: length, key, and the range of the sums."""
        end = 0
        for place, length, key in columns:
            start, end = end, end + SUM_BYTES * number_of_blocks(length)
            self._rows[place] = length, key, start, end
        self._sums = sums

    def row(self, place: int) -> Row | None:
        """Of the tensor whose raw bytes begin at ``place``; None if it has none."""
        found = self._rows.get(place)
        return None if found is None else Row(found[0], found[1], self._sums[found[2] : found[3]])

    def place_within(self, start: int, stop: int) -> int | None:
        """Where the raw bytes of a tensor begin whose item is [start, stop)."""
        return next((place for place in self._rows if start <= place < stop), None)


def read(files: Files, file: str, tensor: str, save: str | None) -> Table:
    """The table of ``file``, which is asked for because of ``tensor``, in the save with the token ``save``.

    Raises ``CannotJudge`` if there is none, or if it is damaged or of another save.
    """
    size = files.size(file, tensor)
    first = max(0, size - _AT_ONCE)
    files.expect([file])
    end = files.content(file, first, size - first, tensor)
    start, rows, sums, digest, sealed, magic = _FOOTER.unpack(end[-FOOTER_BYTES:].rjust(FOOTER_BYTES, b"\0"))
    middle = _ROW_BYTES * rows
    count = middle + SUM_BYTES * sums
    content = b""
    if magic == _MAGIC and start + count + FOOTER_BYTES <= size:
        if start < first:
            files.expect([file])
        content = end[start - first :][:count] if start >= first else files.content(file, start, count, tensor)
    if magic != _MAGIC or number_of(content) != digest:
        raise CannotJudge(
            f"`{files.directory / file}` is damaged: the checksums at its end are not what was saved", _ANOTHER
        )
    if _seal(digest, save) != sealed:
        raise CannotJudge(
            f"`{files.directory / file}` holds another tensor, or one of another save, where `{tensor}` must be",
            "data files were swapped or replaced: load another checkpoint",
        )
    return Table(content[:middle], content[middle:])
