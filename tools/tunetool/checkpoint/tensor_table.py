"""``state_dict_metadata`` as arrays: the tensors' chunks become torch's objects when somebody looks at them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from tunetool.checkpoint.columns import Numbers, narrow, received, sent

if TYPE_CHECKING:
    from tunetool.checkpoint.torch_call import TorchCall

Described = tuple[TensorProperties | None, torch.Size | None]
"""Properties and shape; None of an object that is no tensor."""


class TensorTable(MutableMapping[str, Any]):
    """``names`` and ``described``: of each tensor. ``counts``: the number of its chunks. ``offsets`` and ``sizes``: of
    each chunk, tensor by tensor.

    Pickles are plain dicts, which torch's own writers store and torch alone can read. Those of ``fresh(during)`` are as
    small as its arrays during that call, in which torch sends them to ranks that have this package.
    """

    def __init__(
        self, names: list[str], described: list[Described], counts: Numbers, offsets: Numbers, sizes: Numbers
    ) -> None:
        self.names, self.described = names, described
        self.counts, self.offsets, self.sizes = narrow(counts), narrow(offsets), narrow(sizes)
        dimensions = np.array([len(size or ()) for _, size in described], np.int64)
        self._ends = np.cumsum(dimensions * counts).tolist()
        self._numbers = dict(zip(names, range(len(names)), strict=True))
        self._during: TorchCall | None = None
        self._made: dict[str, Any] = {}
        self._changed: dict[str, Any] | None = None
        """All entries, once somebody has put one in or taken one out."""

    @property
    def is_as_planned(self) -> bool:
        """Whether nobody has got an object of it, which could have been changed."""
        return not self._made and self._changed is None

    def is_of(self, other: Any) -> bool:
        """Whether this table says what ``other`` was planned to say."""
        return isinstance(other, TensorTable) and self.offsets is other.offsets and self.is_as_planned

    def fresh(self, during: TorchCall | None = None) -> TensorTable:
        """The table as it was planned, whatever became of the objects that this one has given away."""
        other = object.__new__(TensorTable)
        other.__dict__.update(self.__dict__, _made={}, _changed=None, _during=during)
        return other

    def bounds(self, name: str) -> tuple[torch.Size | None, Numbers, Numbers]:
        """The shape of a tensor (None for an object), and by chunk and dimension the offsets and sizes."""
        number = self._numbers[name]
        size, count = self.described[number][1], int(self.counts[number])
        dimensions = len(size or ())
        inside = slice(self._ends[number] - count * dimensions, self._ends[number])
        shape = count, dimensions
        return size, self.offsets[inside].reshape(shape), self.sizes[inside].reshape(shape)

    def _of(self, name: str) -> Any:
        properties, _ = self.described[self._numbers[name]]
        size, offsets, sizes = self.bounds(name)
        if properties is None or size is None:
            return BytesStorageMetadata()
        chunks = [
            ChunkStorageMetadata(torch.Size(at), torch.Size(long))
            for at, long in zip(offsets.tolist(), sizes.tolist(), strict=True)
        ]
        return TensorStorageMetadata(copy.copy(properties), size, chunks)

    def _all(self) -> dict[str, Any]:
        if self._changed is None:
            self._changed = {name: self[name] for name in self.names}
        return self._changed

    def __getitem__(self, name: str) -> Any:
        if self._changed is not None:
            return self._changed[name]
        if name not in self._made:
            self._made[name] = self._of(name)
        return self._made[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._all()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names if self._changed is None else self._changed)

    def __contains__(self, name: object) -> bool:
        return name in (self._numbers if self._changed is None else self._changed)

    def __len__(self) -> int:
        return len(self.names if self._changed is None else self._changed)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        if self._during is not None and not self._during.is_over and self.is_as_planned:
            return _arrived, (self.names, self.described, *map(sent, (self.counts, self.offsets, self.sizes)))
        return dict, (dict(self),)


def _arrived(names: list[str], described: list[Described], *arrays: tuple[str, bytes]) -> TensorTable:
    counts, offsets, sizes = map(received, arrays)
    return TensorTable(names, described, counts, offsets, sizes)
