"""Sets one entry of /etc/fstab without changing any other line."""

from __future__ import annotations

import re
from typing import Iterable

from ..common.files import lines, printable, with_line
from .mounts import FstabEntry, parse_fstab, plain_path

FSTAB = "/etc/fstab"


class FstabConflict(Exception):
    """The mount point already belongs to something else."""


def escape(text: str) -> str:
    """A word with blanks, line feeds and backslashes escaped as in fstab(5)."""
    return re.sub(r"[\\ \t\n]", lambda match: "\\%03o" % ord(match.group()), text)


def entries_at(text: str, mount_point: str) -> list[FstabEntry]:
    """The entries for ``mount_point`` in any notation, including those that mount(8) ignores."""
    wanted = plain_path(mount_point)
    return [entry for entry in parse_fstab(text) if plain_path(entry.mount_point) == wanted]


def with_entry(
    text: str, spec: str, mount_point: str, fs_type: str, options: str, replace_any_spec: bool = False
) -> str:
    """fstab with one entry for ``mount_point``, and all other lines unchanged.

    An entry there for another device raises ``FstabConflict`` unless ``replace_any_spec``: somebody put it there.
    Two entries for the mount point raise it always.
    """
    wanted = "%s %s %s %s 0 0" % (escape(spec), escape(mount_point), fs_type, options)
    present = entries_at(text, mount_point)
    if len(present) > 1:
        numbers = ", ".join(str(entry.line_number) for entry in present)
        raise FstabConflict("/etc/fstab has `%s` twice (lines %s)" % (mount_point, numbers))
    if not present:
        return with_line(text, wanted)
    entry = present[0]
    if entry.spec != spec and not replace_any_spec:
        raise FstabConflict(_conflict(entry, mount_point))
    current = (entry.spec, entry.fs_type, ",".join(entry.options), entry.skipped)
    if current == (spec, fs_type, options, False):
        return text
    whole = lines(text)
    old = whole[entry.line_number - 1]
    whole[entry.line_number - 1] = wanted + old[len(old.rstrip("\r\n")) :]
    return "".join(whole)


def _conflict(entry: FstabEntry, mount_point: str) -> str:
    spec = printable(entry.spec)
    return "/etc/fstab line %d mounts `%s` at `%s`" % (entry.line_number, spec, mount_point)


def foreign_entry(text: str, mount_point: str, specs: Iterable[str]) -> str | None:
    """The first entry for ``mount_point`` whose device is none of ``specs``, in words."""
    known = set(specs)
    for entry in entries_at(text, mount_point):
        if entry.spec not in known:
            return _conflict(entry, mount_point)
    return None


def without_entry(text: str, uuid: str) -> str:
    """fstab without the entries for the file system ``uuid``, and all other lines unchanged."""
    ours = {entry.line_number for entry in parse_fstab(text) if entry.spec == "UUID=" + uuid}
    return "".join(line for number, line in enumerate(lines(text), start=1) if number not in ours)
