"""/etc/fstab: reads its entries as libmount does, and sets one without changing any other line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Iterable

from ..common.files import lines, printable, with_line
from .mounts import plain_path, unescape

FSTAB = "/etc/fstab"
_NUMBER = re.compile(r"[\v\f\r]*[+-]?[0-9]+", re.ASCII)
_TAG = re.compile(r"""([A-Z]+=)(["'])(.*)\2""", re.DOTALL)


class FstabConflict(Exception):
    """The mount point already belongs to something else."""


@dataclass(frozen=True)
class FstabEntry:
    """One line of /etc/fstab that is not a comment."""

    spec: str
    """The device, without the quotes that may enclose the value of a tag: ``UUID="1-2"`` is ``UUID=1-2``."""
    mount_point: str
    fs_type: str
    options: tuple[str, ...]
    """Empty if the line ends before the options, which means ``defaults``."""
    line_number: int
    skipped: bool = False
    """Whether mount(8) ignores the line: it is too short, or has a word instead of a number."""


def escape(text: str) -> str:
    """A word with blanks, line feeds and backslashes escaped as in fstab(5)."""
    return re.sub(r"[\\ \t\n]", lambda match: "\\%03o" % ord(match.group()), text)


def parse_fstab(text: str) -> list[FstabEntry]:
    """Every line of an fstab that is neither empty nor a comment, as libmount reads it.

    Three fields suffice. A line that libmount passes over is marked so: another reader may well take it, as systemd
    did before 254.
    """
    entries = []
    for number, line in enumerate(lines(text), start=1):
        plain = line.rstrip("\n").partition("\0")[0]
        plain = plain[:-1] if plain.endswith("\r") else plain
        fields = [field for field in re.split(r"[ \t]+", plain) if field]
        if not fields or fields[0].startswith("#"):
            continue
        spec, mount_point, fs_type, options = (unescape(field) for field in [*fields, "", "", ""][:4])
        entries.append(
            FstabEntry(
                spec=_TAG.sub(r"\1\3", spec),
                mount_point=mount_point,
                fs_type=fs_type,
                options=tuple(options.split(",")) if options else (),
                line_number=number,
                skipped=len(fields) < 3 or not all(_NUMBER.fullmatch(field) for field in fields[4:6]),
            )
        )
    return entries


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
