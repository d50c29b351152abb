"""What a checkpoint holds, by its `.metadata` alone: tensors with their pieces, and objects. Reads no data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from tunetool.checkpoint import bulk, metadata
from tunetool.checkpoint.metadata_pickle import SUMS
from tunetool.errors import UsageProblem

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


class Piece(NamedTuple):
    """One stored piece: a chunk of a tensor, or an object, for which ``offsets`` and ``sizes`` are empty.

    ``start`` and ``length``: its bytes in the file, with what is around them. ``rank``: that wrote it, by the file's
    name.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    rank: int | None
    start: int
    length: int


@dataclass(frozen=True)
class Stored:
    """A tensor, or an object, which has no dtype and shape. ``bytes``: of its elements, or of the pickled object."""

    name: str
    dtype: str | None
    shape: tuple[int, ...]
    bytes: int
    pieces: tuple[Piece, ...]

    @property
    def files(self) -> list[str]:
        """The files that it is in."""
        return sorted({piece.file for piece in self.pieces})

    @property
    def ranks(self) -> list[int]:
        """The ranks that wrote it, as far as the names of files say."""
        return sorted({piece.rank for piece in self.pieces if piece.rank is not None})


@dataclass(frozen=True)
class Contents:
    """All that was asked for."""

    stored: tuple[Stored, ...]
    has_sums: bool
    """Whether the save made checksums."""

    @property
    def tensors(self) -> list[Stored]:
        """Those that are tensors."""
        return [each for each in self.stored if each.dtype is not None]

    @property
    def objects(self) -> list[Stored]:
        """Those that are none."""
        return [each for each in self.stored if each.dtype is None]


def contents(step: Path, glob: str | None = None) -> Contents:
    """What the checkpoint in ``step`` holds, of the names that match ``glob``.

    Raises ``UsageProblem`` if it cannot be read, or no name matches.
    """
    described = metadata.read(step)
    stored = tuple(_stored(name, described) for name in matching(described.state_dict_metadata, glob, f"`{step}`"))
    return Contents(stored, getattr(described, SUMS, None) is not None)


def matching(names: Iterable[str], glob: str | None, where: str) -> list[str]:
    """The names that match ``glob``, each once; all without one. Raises ``UsageProblem`` if none does."""
    distinct = list(dict.fromkeys(names))
    if glob is None:
        return distinct
    found = [name for name in distinct if fnmatchcase(name, glob)]
    if not found:
        shown = f"such as `{distinct[0]}`" if distinct else "which has nothing"
        raise UsageProblem(f"`{glob}` matches nothing in {where}", f"give a name that it has, or a pattern, {shown}")
    return found


def pieces_of(name: str, about: Any) -> Iterator[tuple[MetadataIndex, tuple[int, ...], tuple[int, ...]]]:
    """What must be stored of a name that is described so: index, offsets and sizes."""
    if isinstance(about, TensorStorageMetadata):
        for chunk in about.chunks:
            yield MetadataIndex(name, chunk.offsets), tuple(chunk.offsets), tuple(chunk.sizes)
    else:
        yield MetadataIndex(name), (), ()


def _stored(name: str, described: Metadata) -> Stored:
    about, places, pieces = described.state_dict_metadata[name], described.storage_data or {}, []
    for index, offsets, sizes in pieces_of(name, about):
        place = places.get(index)
        if place is not None:
            at = place.relative_path, bulk.writer_of(place.relative_path), place.offset, place.length
            pieces.append(Piece(offsets, sizes, *at))
    if not isinstance(about, TensorStorageMetadata):
        return Stored(name, None, (), sum(piece.length for piece in pieces), tuple(pieces))
    dtype, shape = about.properties.dtype, tuple(about.size)
    return Stored(name, str(dtype).removeprefix("torch."), shape, math.prod(shape) * dtype.itemsize, tuple(pieces))
