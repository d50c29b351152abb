"""The shape of a state: all that torch's planner looks at, without the values. Taken anew at every save, and compared.

Two states of equal shape have the same plan. A state with something in it whose plan may depend on more, such as a
tensor of a class of its own, has no shape here, and is planned anew at every save.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_TABLE, _LIST, _ENTRY, _END = object(), object(), object(), object()
"""Marks between the keys, so that different nestings differ."""
_SCALARS = frozenset({int, float, str, bool, type(None), bytes, complex, torch.dtype, torch.device})
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Classes of tensors that are nothing but elements and where they are."""


@dataclass
class StateShape:
    """``keys``: every key in order, with marks for what is nested. ``leaves``: what torch's planner gets of every value
    that is not nested any more."""

    keys: list[Any]
    leaves: list[Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateShape) and self.keys == other.keys and self.leaves == other.leaves

    __hash__ = None  # type: ignore[assignment]  # tensors' shapes change


def values_of(state: Mapping[Any, Any]) -> tuple[list[Any], list[Any]]:
    """The keys of the state, with marks, and its values in the order in which torch flattens them."""
    keys: list[Any] = []
    values: list[Any] = []
    _table(state, keys, values)
    return keys, values


def _table(table: Mapping[Any, Any], keys: list[Any], values: list[Any]) -> None:
    for key, value in table.items():
        keys.append(key if type(key) is str else str(key))
        _value(value, keys, values)


def _value(value: Any, keys: list[Any], values: list[Any]) -> None:
    if type(value) in PLAIN:
        values.append(value)
    elif isinstance(value, Mapping):
        keys.append(_TABLE)
        _table(value, keys, values)
        keys.append(_END)
    elif isinstance(value, list) and not _is_leaf(value):
        keys.append(_LIST)
        for each in value:
            keys.append(_ENTRY)
            _value(each, keys, values)
        keys.append(_END)
    else:
        values.append(value)


def _is_leaf(values: list[Any]) -> bool:
    """Whether torch keeps a list whole: nothing in it is a tensor or a table, however deep."""
    if set(map(type, values)) <= _SCALARS:
        return True
    return not any(
        isinstance(each, (Mapping, torch.Tensor)) or (isinstance(each, list) and not _is_leaf(each)) for each in values
    )


def leaves_of(values: list[Any]) -> list[Any] | None:
    """All that a plan depends on, for each value; None if that is not known for one of them."""
    leaves: list[Any] = []
    for value in values:
        if type(value) in PLAIN:
            try:
                leaves.append((type(value), *_of_tensor(value)))
            except RuntimeError:
                # A nested tensor has no shape.
                return None
            continue
        leaf = _other(value)
        if leaf is None:
            return None
        leaves.append(leaf)
    return leaves


def _of_tensor(value: torch.Tensor) -> tuple[Any, ...]:
    # `.metadata` says whether the memory is pinned, too.
    pinned = value.is_cpu and value.is_pinned()
    return value.shape, value.dtype, value.device, value.requires_grad, value.layout, pinned


def _other(value: Any) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return kind
    if kind is DTensor:
        local = value._local_tensor
        if type(local) not in PLAIN:
            return None
        mesh = value.device_mesh
        # A mesh is equal to that of a process group of before, where this process had another rank.
        # A list in earlier releases of torch; None where this rank is outside the mesh.
        coordinate = mesh.get_coordinate()
        where = None if coordinate is None else tuple(coordinate)
        whole = (kind, value.shape, value.dtype, value.requires_grad, value.placements, mesh, where)
        return (*whole, *_of_tensor(local))
    if isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
        return None
    if isinstance(value, (tuple, list)) and not set(map(type, value)) <= _SCALARS:
        return None
    return kind
