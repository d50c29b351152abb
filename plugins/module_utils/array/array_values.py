"""What no array can be: judges its name, chunk and number of drives, without reading anything."""

from __future__ import annotations

import re
from typing import Sequence

from ..units import UnitError, parse_size

CHUNK_MIN = 4096
"""Chunk in bytes: md needs whole pages, and for RAID0 on older kernels a power of two (md(4))."""
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


def drives_problems(count: int, size: str, serials: Sequence[str]) -> list[str]:
    """The problems of the drives that are asked for, each with its hint."""
    problems = []
    if count < 1:
        problems.append("`nvme_drives_count` is %d. hint: an array needs at least one drive" % count)
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
