"""Checks plain data from an untrusted file: allowed types, depth, and which values may be hashed. Pure."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any

_NESTED = 64
"""Largest nesting depth of a dict key or of plain data."""
_KEY_PARTS = 100
"""Largest number of values within one dict key."""
_ALIKE = 64
"""Largest number of keys of a table that have the same hash."""


class Malformed(ValueError):
    """The pickle is not one that Python's pickler would write for such data; the message says why."""


_SCALARS = frozenset({str, int, bool, type(None), float, bytes, complex})


def check_key(key: Any, allowed: frozenset[type] = frozenset()) -> None:
    """Raises ``Malformed`` if ``key`` cannot be a dict key, or would take too long to hash."""
    kind = type(key)
    if kind in _SCALARS or kind in allowed:
        return
    parts, level, seen = [key], 0, 0
    while parts:
        level += 1
        below: list[Any] = []
        for part in parts:
            kind = type(part)
            if kind is tuple or kind is frozenset:
                seen += len(part)
                if seen > _KEY_PARTS or level > _NESTED:
                    raise Malformed("a key of a table is nested too deeply")
                below += part
            elif kind not in _SCALARS and kind not in allowed:
                raise Malformed(f"a `{kind.__name__}` is a key of a table")
        parts = below


def count_hash(key: Any, counts: dict[int, int]) -> None:
    """Count a key of a table by its hash, which ``check_key`` must have allowed. Raises ``Malformed`` if too many have
    the same one: each is compared with all of those before, and only keys that are made for that are so many."""
    hashed = hash(key)
    counts[hashed] = count = counts.get(hashed, 0) + 1
    if count > _ALIKE:
        raise Malformed(f"more than {_ALIKE} keys of a table have the same hash")


def check_plain(value: Any, leaves: Callable[[Any], bool] = lambda _: False) -> None:
    """Raises ``Malformed`` unless ``value`` is plain data of at most 64 levels; ``leaves`` returns True for other
    objects that are allowed."""
    level, seen, level_parts = 0, set[int](), [value]
    while level_parts:
        level += 1
        if level > _NESTED:
            raise Malformed("it is nested too deeply")
        below: list[Any] = []
        for part in level_parts:
            kind = type(part)
            if kind in _SCALARS:
                continue
            if kind in _CONTAINERS:
                # A shared value is checked once; a value that contains itself ends at the depth limit.
                if id(part) not in seen:
                    seen.add(id(part))
                    below += part
                    if kind is dict or kind is collections.OrderedDict:
                        below += part.values()
            elif not leaves(part):
                raise Malformed(f"it holds a `{kind.__name__}`")
        level_parts = below


_CONTAINERS = frozenset({tuple, list, dict, collections.OrderedDict, set, frozenset})


def hashable(items: Iterable[Any], counts: dict[int, int] | None = None) -> Iterable[Any]:
    """The items, each checked before it is hashed. ``counts``: those of the set that they come into; default: a new
    one."""
    counts = {} if counts is None else counts
    for item in items:
        check_key(item)
        if type(item) is not str:
            count_hash(item, counts)
        yield item


def as_set(*arguments: Any) -> set[Any]:
    """For ``Call``: a set, from nothing or a list."""
    return set(hashable(_emptied(arguments)))


def as_frozenset(*arguments: Any) -> frozenset[Any]:
    """For ``Call``: a frozen set, from nothing or a list."""
    return frozenset(hashable(_emptied(arguments)))


def as_complex(*arguments: Any) -> complex:
    """For ``Call``: a complex number, from its two parts."""
    if len(arguments) != 2 or not all(type(part) is float for part in arguments):
        raise Malformed("a complex number is not made from two numbers")
    return complex(*arguments)


def as_dict(*arguments: Any) -> dict[Any, Any]:
    """For ``Call``: a dict, from one."""
    if len(arguments) != 1 or type(arguments[0]) is not dict:
        raise Malformed("a dict is made from something that is none")
    made: dict[Any, Any] = arguments[0]
    return made


def ordered_dict(*arguments: Any) -> collections.OrderedDict[Any, Any]:
    """For ``Call``: an empty OrderedDict, which the pickle fills."""
    if arguments:
        raise Malformed("an OrderedDict is made of something")
    return collections.OrderedDict()


def _emptied(arguments: tuple[Any, ...]) -> list[Any]:
    """The items of the list, which is emptied: the pickler writes it for one set only, and copies could fill memory."""
    if not arguments:
        return []
    if len(arguments) != 1 or type(arguments[0]) is not list:
        raise Malformed("a set is made from something that is not a list")
    items = arguments[0].copy()
    arguments[0].clear()
    return items
