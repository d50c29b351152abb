# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Names of variables that no role reads: they begin with a role's name, or are almost a variable of ours. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

LETTERS = 2
"""Names within so many added, lost, changed or swapped letters of one of ours count as misspelt."""
SHORT = 12
"""Names of fewer letters count only within one: more would be other words."""
_ANSIBLE = ("ansible_", "_")


def unknown_variables(names: Iterable[str], known: Collection[str], prefixes: tuple[str, ...]) -> list[str]:
    """A line for each name that no role reads, though it begins with one of ``prefixes`` or is almost ``known``."""
    problems = []
    for name in sorted(set(names) - set(known)):
        if name.startswith(prefixes):
            near = difflib.get_close_matches(name, sorted(known), n=1)
        else:
            near = [] if name.startswith(_ANSIBLE) else misspelt(name, known)
            if not near:
                continue
        problems.append(
            "`%s` is not a variable of this collection%s" % (name, "; did you mean `%s`?" % near[0] if near else "")
        )
    return problems


def misspelt(name: str, known: Iterable[str]) -> list[str]:
    """The one of ``known`` that ``name`` is a misspelling of, if any."""
    most = LETTERS if len(name) >= SHORT else 1
    near = []
    for other in known:
        # Cheap first: a fleet's variables are compared host by host.
        if abs(len(name) - len(other)) <= most and len(set(name) ^ set(other)) <= 2 * most:
            letters = distance(name, other, most)
            if letters <= most:
                near.append((letters, other))
    return [other for _letters, other in sorted(near)[:1]]


def distance(one: str, other: str, most: int) -> int:
    """Letters to add, drop, change or swap with the next one, to get from a name to another; above ``most``: any number
    above it."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for at, letter in enumerate(one, start=1):
        last, before, row = before, row, [at]
        for to, wanted in enumerate(other, start=1):
            cost = min(before[to] + 1, row[to - 1] + 1, before[to - 1] + (letter != wanted))
            if at > 1 and to > 1 and letter == other[to - 2] and one[at - 2] == wanted:
                cost = min(cost, last[to - 2] + 1)
            row.append(cost)
        if min(row) > most and min(before) > most:
            return most + 1
    return row[-1]
