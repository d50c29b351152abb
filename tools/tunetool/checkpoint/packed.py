"""Sequences that travel between ranks as bytes. A rank that has met the same bytes before does not unpickle them."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any, Generic, TypeVar

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

T = TypeVar("T")


class Packed(Sequence[T], Generic[T]):
    """A sequence that never changes: the parts, their pickle, or both; each is made from the other when it is needed.

    Sent by torch's collectives, whose pickles the ranks of a job trust.
    """

    __slots__ = ("_digest", "_parts", "_pickle")

    def __init__(self, parts: Iterable[T] | None, pickled: bytes | None = None) -> None:
        self._parts = None if parts is None else list(parts)
        self._pickle = pickled
        self._digest: bytes | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Packed, (None, self.pickled())

    def pickled(self) -> bytes:
        """The pickle of the list of parts."""
        if self._pickle is None:
            self._pickle = pickle.dumps(self._parts, 4)
        return self._pickle

    def parts(self) -> list[T]:
        """All parts. The list must not be changed."""
        # Read once: another thread may forget them meanwhile.
        parts = self._parts
        if parts is None:
            assert self._pickle is not None  # noqa: S101  (the parts or their pickle are always there)
            parts = self._parts = pickle.loads(self._pickle)  # noqa: S301  (of another rank of this job)
        return parts

    def same_as(self, other: Packed[T]) -> bool:
        """Whether the parts are known to be equal, without a look at them: the same object, or the same pickle.

        False if that is not known.
        """
        if self is other:
            return True
        if self._pickle is None or other._pickle is None:
            return False
        return len(self._pickle) == len(other._pickle) and self._digest_of_pickle() == other._digest_of_pickle()

    def _digest_of_pickle(self) -> bytes:
        if self._digest is None:
            self._digest = hashlib.blake2b(self._pickle or b"", digest_size=16).digest()
        return self._digest

    def forget_parts(self) -> None:
        """Free the parts where the pickle is there too."""
        if self._pickle is not None:
            self._parts = None

    def __len__(self) -> int:
        return len(self.parts())

    def __getitem__(self, number: Any) -> Any:
        return self.parts()[number]

    def __iter__(self) -> Iterator[T]:
        return iter(self.parts())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Packed, list)):
            return NotImplemented
        return self is other or self.parts() == list(other)

    __hash__ = None  # type: ignore[assignment]  # compared by its parts, like a list


Stored = tuple[MetadataIndex, int, int, int]
"""An item: its index, the number of its file within the rank's files, its offset and its length there."""


class Results(Sequence[WriteResult]):
    """What a rank has written. From save to save only the names of the files change as long as the plan does not."""

    __slots__ = ("names", "stored")

    def __init__(self, stored: Packed[Stored], names: tuple[str, ...]) -> None:
        self.stored, self.names = stored, names

    def __reduce__(self) -> tuple[Any, ...]:
        return Results, (self.stored, self.names)

    def infos(self) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
        """Index and location of every item."""
        names = self.names
        for index, file, offset, length in self.stored:
            yield index, _StorageInfo(names[file], offset, length)

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, number: Any) -> Any:
        return list(self)[number]

    def __iter__(self) -> Iterator[WriteResult]:
        for index, info in self.infos():
            yield WriteResult(index, info.length, info)


class Locations(MutableMapping[MetadataIndex, _StorageInfo]):
    """``storage_data``: where each item of all ranks is. The table is made when somebody looks into it; for pickles it
    is a plain dict."""

    def __init__(self, ranks: Sequence[Results]) -> None:
        self._ranks = ranks
        self._table: dict[MetadataIndex, _StorageInfo] | None = None

    def _made(self) -> dict[MetadataIndex, _StorageInfo]:
        if self._table is None:
            self._table = {index: info for rank in self._ranks for index, info in rank.infos()}
        return self._table

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._made(),)

    def __repr__(self) -> str:
        return repr(self._made())

    def __getitem__(self, index: MetadataIndex) -> _StorageInfo:
        return self._made()[index]

    def __setitem__(self, index: MetadataIndex, info: _StorageInfo) -> None:
        self._made()[index] = info

    def __delitem__(self, index: MetadataIndex) -> None:
        del self._made()[index]

    def __iter__(self) -> Iterator[MetadataIndex]:
        return iter(self._made())

    def __len__(self) -> int:
        return len(self._made())
