"""Drop-ins that keep systemd units from starting without the scratch volume."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from dataclasses import dataclass
from typing import Sequence

from ..common.files import content, replace_file

UNITS_DIRECTORY = "/etc/systemd/system"
FILE_NAME = "60-tunetool-scratch.conf"
HEADER = "# Written by tunetool (scratch_filesystem_services); it goes when the unit is no longer named there."

_UNIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@-]*\.(service|socket|timer|path|target)")


class ForeignDropIn(Exception):
    """A file with our name that tunetool did not write."""


@dataclass(frozen=True)
class Change:
    """A drop-in that must be written, or removed where ``after`` is empty."""

    path: str
    before: str
    after: str


def units_problem(units: Sequence[str]) -> str | None:
    """The problem of the units' names, or None."""
    for unit in units:
        if not _UNIT.fullmatch(unit):
            return "`%s` is not the name of a systemd unit. hint: write it in full, such as `slurmd.service`" % unit
    return None


def render(mount_point: str) -> str:
    """The drop-in's text. RequiresMountsFor= starts the mount first, and the unit only with it."""
    return "%s\n[Unit]\nRequiresMountsFor=%s\n" % (HEADER, quoted(mount_point))


def quoted(path: str) -> str:
    """A path as a word of a unit file."""
    word = path.replace("%", "%%")
    if re.search(r"[\s\"'\\]", word):
        word = '"%s"' % word.replace("\\", "\\\\").replace('"', '\\"')
    return word


def changes(units: Sequence[str], mount_point: str, directory: str = UNITS_DIRECTORY) -> list[Change]:
    """Differences from one drop-in for each of ``units`` and none for others. Raises ``ForeignDropIn``."""
    text = render(mount_point)
    wanted = {os.path.join(directory, unit + ".d", FILE_NAME): text for unit in units}
    present = glob.glob(os.path.join(glob.escape(directory), "*.d", FILE_NAME))
    changed = []
    for path in sorted(set(present) | set(wanted)):
        before = content(path)
        ours = before.startswith(HEADER)
        if before and not ours:
            if path in wanted:
                raise ForeignDropIn("`%s` is not tunetool's. hint: move it to another name" % path)
            continue
        after = wanted.get(path, "")
        if before != after:
            changed.append(Change(path, before, after))
    return changed


def apply(change: Change) -> None:
    """Write the drop-in, or remove it and its directory if that is empty then."""
    if change.after:
        replace_file(change.path, change.after)
        return
    os.unlink(change.path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(change.path))
