"""Packs the surveys of ranks for their exchange: long tables, which many ranks have alike, travel once.

A survey lists the files of each save. All nodes that have `.metadata` have the same list of the whole job, and of steps
on shared storage the same files; a gather of these would take as much from each rank, padded to the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tunetool.checkpoint.agreement import Survey
from tunetool.checkpoint.checksums import digest_of

_FIELDS = ("needed", "holders", "files", "filed")
"""What of a ``StepCopy`` has an entry for each file."""
_SHORT = 16
"""Entries of a table that stays in its survey: those of one node's ranks."""
Tables = dict[str, Mapping[str, Any]]
"""Tables by the digest of what they say."""


@dataclass(frozen=True)
class SentSurvey:
    """A survey without its long tables."""

    survey: Survey
    tables: Mapping[tuple[int, str], str] = field(default_factory=dict)
    """The digests of these, by the number of the copy, and the field."""


def packed(survey: Survey) -> tuple[SentSurvey, Tables]:
    """The survey, and what it does not carry. Pure."""
    named: dict[tuple[int, str], str] = {}
    tables = Tables()
    copies = []
    for number, copy in enumerate(survey.copies):
        long = {name: table for name in _FIELDS if len(table := getattr(copy, name)) > _SHORT}
        for name, table in long.items():
            named[number, name] = digest_of(repr(sorted(table.items())).encode())
            tables[named[number, name]] = table
        none: dict[str, Any] = {name: {} for name in long}
        copies.append(replace(copy, **none) if long else copy)
    return SentSurvey(replace(survey, copies=tuple(copies)), named), tables


def unpacked(every: Sequence[SentSurvey], own: Tables, send: Callable[[int, Tables], Tables]) -> list[Survey]:
    """The surveys with all tables, from those of all ranks by rank. ``own``: those of this rank. ``send``: gives all
    ranks what the rank of that number passes; every rank calls it, in the same order."""
    givers: dict[str, int] = {}
    for rank, each in enumerate(every):
        for digest in each.tables.values():
            givers.setdefault(digest, rank)
    tables = Tables()
    for giver in sorted(set(givers.values())):
        given = {digest: own[digest] for digest, rank in givers.items() if rank == giver and digest in own}
        tables |= send(giver, given)
    return [_with(each, tables) for each in every]


def _with(each: SentSurvey, tables: Tables) -> Survey:
    long: dict[int, dict[str, Any]] = {}
    for (number, name), digest in each.tables.items():
        long.setdefault(number, {})[name] = tables[digest]
    copies = [replace(copy, **long.get(number, {})) for number, copy in enumerate(each.survey.copies)]
    return replace(each.survey, copies=tuple(copies)) if long else each.survey
