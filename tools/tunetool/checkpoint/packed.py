"""Sequences that travel between ranks as bytes. A rank that has met the same bytes before does not unpickle them."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from tunetool.checkpoint.checksums import Sums
from tunetool.checkpoint.columns import Columns, Numbers, columns_of, narrow, received, sent

if TYPE_CHECKING:
    from tunetool.checkpoint.torch_call import TorchCall

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
            self._pickle = pickle.dumps(self.parts(), 4)
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


class PackedItems(Packed[WriteItem]):
    """Write items, which travel as columns where columns can say all of them, else as their pickle."""

    __slots__ = ("_asked", "_columns")

    def __init__(
        self, parts: Iterable[WriteItem] | None, pickled: bytes | None = None, columns: Columns | None = None
    ) -> None:
        super().__init__(parts, pickled)
        self._columns = columns
        self._asked = columns is not None

    def __reduce__(self) -> tuple[Any, ...]:
        columns = self.columns()
        return PackedItems, (None, self.pickled(), None) if columns is None else (None, None, columns)

    @property
    def known_columns(self) -> Columns | None:
        """The items as columns, if they are columns already."""
        return self._columns

    def columns(self) -> Columns | None:
        """The items as columns; None if columns cannot say them."""
        if not self._asked:
            self._columns = columns_of(self.parts())
            self._asked = True
        return self._columns

    def parts(self) -> list[WriteItem]:
        # Read once: another thread may forget them meanwhile.
        parts = self._parts
        if parts is None and self._columns is not None:
            parts = self._parts = self._columns.items()
        return super().parts() if parts is None else parts

    def same_as(self, other: Packed[WriteItem]) -> bool:
        ours, others = self._columns, other._columns if isinstance(other, PackedItems) else None
        if self is other or ours is None or others is None:
            return super().same_as(other)
        return ours.same_as(others)

    def forget_parts(self) -> None:
        if self._pickle is not None or self._columns is not None:
            self._parts = None

    def __len__(self) -> int:
        return len(self.parts() if self._columns is None else self._columns)


Stored = tuple[MetadataIndex, int, int, int]
"""An item: its index, the number of its file within the rank's files, its offset and its length there."""


class PackedStored(Packed[Stored]):
    """Where the items of a plan are: by item, the number of the file, the offset and the length."""

    __slots__ = ("items", "where")

    def __init__(self, items: PackedItems, where: tuple[Numbers, Numbers, Numbers]) -> None:
        super().__init__(None)
        self.items, self.where = items, where

    @classmethod
    def of(
        cls, items: PackedItems, files: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]
    ) -> PackedStored:
        file, offset, length = (narrow(np.array(each, np.int64)) for each in (files, offsets, lengths))
        return cls(items, (file, offset, length))

    def __reduce__(self) -> tuple[Any, ...]:
        return _stored, (self.items, *map(sent, self.where))

    def parts(self) -> list[Stored]:
        parts = self._parts
        if parts is None:
            indexes = [item.index for item in self.items.parts()]
            parts = self._parts = list(zip(indexes, *(each.tolist() for each in self.where), strict=True))
        return parts

    def same_as(self, other: Packed[Stored]) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, PackedStored)
            and self.items.same_as(other.items)
            and all(map(np.array_equal, self.where, other.where))
        )

    def forget_parts(self) -> None:
        self._parts = None

    def __len__(self) -> int:
        return len(self.where[0])


def _stored(items: PackedItems, *where: tuple[str, bytes]) -> PackedStored:
    file, offset, length = map(received, where)
    return PackedStored(items, (file, offset, length))


class Results(Sequence[WriteResult]):
    """What a rank has written. From save to save only the names of the files and the checksums change as long as the
    plan does not.

    ``sums``: of the items that are no plain tensors; None if no checksums were asked for. ``holders``: of each file the
    ranks that hold its items too, see ``holders.text_of``; None if that is not known.
    """

    __slots__ = ("holders", "names", "stored", "sums")

    def __init__(
        self,
        stored: Packed[Stored],
        names: tuple[str, ...],
        sums: Sums | None = None,
        holders: tuple[str, ...] | None = None,
    ) -> None:
        self.stored, self.names, self.sums, self.holders = stored, names, sums, holders

    def __reduce__(self) -> tuple[Any, ...]:
        return Results, (self.stored, self.names, self.sums, self.holders)

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
    """``storage_data``: where each item of all ranks is. The table is made when somebody looks into it.

    Pickles are plain dicts, which torch alone can read. During the call ``during``, in which torch sends them to ranks
    that have this package, they are what the ranks have sent, if that is columns.
    """

    def __init__(self, ranks: Sequence[Results], during: TorchCall | None = None) -> None:
        self._ranks, self._during = ranks, during
        self._table: dict[MetadataIndex, _StorageInfo] | None = None

    def _made(self) -> dict[MetadataIndex, _StorageInfo]:
        if self._table is None:
            self._table = {index: info for rank in self._ranks for index, info in rank.infos()}
        return self._table

    def __reduce__(self) -> tuple[Any, ...]:
        columns = all(isinstance(rank.stored, PackedStored) for rank in self._ranks)
        if self._during is not None and not self._during.is_over and self._table is None and columns:
            return Locations, (self._ranks,)
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
