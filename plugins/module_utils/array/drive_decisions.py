"""A decision about every drive: what the owner asks for, the verdicts, and the table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Iterable, Mapping, Sequence

from ..common.raid_levels import ACCEPTED, BUILT_LEVELS, DEFAULT, canonical
from ..machine.drives import Drive
from ..units import UnitError, format_size, format_size_binary, parse_size
from .drive_volumes import ALL, DRIVE, GROUPS, NUMA

TAKE, KEEP, REFUSE, IGNORE = "take", "keep", "refuse", "ignore"
WIPE, ADOPT = "wipe", "adopt"
DRIVES: dict[str, Any] = {
    "count": {"type": "int", "required": True},
    "model": {"type": "str", "default": ""},
    "size": {"type": "str", "default": ""},
    "transport": {"type": "str", "default": ""},
    "serials": {"type": "list", "elements": "str", "default": []},
}
"""The variables of the role nvme_drives, as a module takes them."""
ARRAY: dict[str, Any] = {
    "name": {"type": "str", "required": True},
    "chunk": {"type": "str", "default": "1MiB"},
    "level": {"type": "str", "choices": [*ACCEPTED], "default": DEFAULT},
    "adopt": {"type": "bool", "default": False},
    "groups": {"type": "str", "choices": [*GROUPS], "default": ALL},
}
"""Those of the role raid_array."""


@dataclass(frozen=True)
class Criteria:
    """The drives that the owner wants. All given conditions must hold."""

    count: int
    model: str | None = None
    """Glob for the model string, case-sensitive: ``SAMSUNG MZWLO3T8*``."""
    size_bytes: int | None = None
    transport: str | None = None
    serials: tuple[str, ...] = ()


def criteria_of(wanted: Mapping[str, Any]) -> Criteria:
    """What ``DRIVES`` ask for. Raises ``UnitError``."""
    return Criteria(
        count=wanted["count"],
        model=wanted["model"] or None,
        size_bytes=parse_size(wanted["size"]) if wanted["size"] else None,
        transport=wanted["transport"] or None,
        serials=tuple(wanted["serials"]),
    )


@dataclass(frozen=True)
class Decision:
    """One drive's row in the table."""

    drive: Drive
    verdict: str
    """take (blank), keep (member of our own array), refuse (asked for, but not safe), ignore (not asked for),
    wipe (holds something that a plan may give up), adopt (member of an array that is as asked but for its name)."""
    reason: str


def wipeable(decisions: Sequence[Decision]) -> list[Drive]:
    """The drives to wipe."""
    return [row.drive for row in decisions if row.verdict == WIPE]


def by_serial(names: Iterable[str | None], serials: Mapping[str, str] | None) -> str:
    """Drives for a message: by serial, which a person finds on them, else by kernel name. ``serials``: by that name."""
    known = serials or {}
    return ", ".join("`%s`" % known[name] if name and known.get(name) else str(name) for name in names)


def shown_size(count: int) -> str:
    """The size in decimal units, as drives are sold, unless the binary figure is round."""
    return format_size_binary(count) if count % 2**30 == 0 else format_size(count)


def table(decisions: Sequence[Decision]) -> str:
    """The rows as fixed-width text, one drive a line."""
    header = ("drive", "serial", "model", "size", "verdict", "reason")
    lines = [header] + [
        (
            row.drive.name,
            row.drive.serial or "(none)",
            row.drive.model,
            shown_size(row.drive.size_bytes),
            row.verdict,
            row.reason,
        )
        for row in decisions
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header) - 1)]
    return "\n".join(
        "  ".join([cell.ljust(width) for cell, width in zip(line, widths)] + [line[-1]]).rstrip() for line in lines
    )


CHUNK_MIN = 4096
"""Chunk in bytes: md needs whole pages, and on older kernels a power of two (md(4))."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,30}")


def name_problem(name: str) -> str | None:
    """The problem of the array's name, with its hint, or None."""
    if not _NAME.fullmatch(name) or name.startswith("md"):
        return "`%s` cannot name an array. hint: letters, digits, `_`, `.`, `-`; not `md...`" % name
    return None


def chunk_problem(text: str) -> str | None:
    """The problem of the chunk, with its hint, or None."""
    try:
        chunk = parse_size(text)
    except UnitError as error:
        return "raid_array_chunk: %s. hint: %s" % (error.message, error.hint)
    if chunk < CHUNK_MIN or chunk & (chunk - 1):
        return "chunk `%s` is not a power of two from 4KiB. hint: use `1MiB`" % text
    return None


LONGEST_OF_SEVERAL = 24
"""Of the array's name in characters where there are several: md keeps 32, and each adds the name of its volume."""


def groups_problem(array: Mapping[str, Any]) -> str | None:
    """The problem of ``ARRAY`` where there are several volumes, with its hint, or None."""
    groups = array["groups"]
    if groups == ALL:
        return None
    if array["adopt"]:
        why = "several volumes are not adopted"
        return "`raid_array_adopt` and `raid_array_groups: %s`: %s. hint: leave out one" % (groups, why)
    if canonical(array["level"]) != DEFAULT:
        why = "without an array there is none" if groups == DRIVE else "each array is a RAID0"
        return "`raid_array_level` and `raid_array_groups: %s`: %s. hint: leave out one" % (groups, why)
    if groups == NUMA and len(array["name"]) > LONGEST_OF_SEVERAL:
        return (
            "`raid_array_name: %s` is too long for `raid_array_groups: numa`, which adds `_numa0`. hint: %d letters "
            "at most" % (array["name"], LONGEST_OF_SEVERAL)
        )
    return None


def drives_problems(count: int, size: str, serials: Sequence[str], level: str = DEFAULT) -> list[str]:
    """The problems of the drives that are asked for, each with its hint."""
    problems = []
    lacking = BUILT_LEVELS[level].lacks(count)
    if lacking:
        problems.append("`nvme_drives_count` is %d. hint: %s" % (count, lacking))
    if serials and len(set(serials)) < count:
        problems.append(
            "`nvme_drives_serials` names %d of %d drives. hint: name them all, or none" % (len(set(serials)), count)
        )
    if size:
        try:
            parse_size(size)
        except UnitError as error:
            problems.append("nvme_drives_size: %s. hint: %s" % (error.message, error.hint))
    return problems
