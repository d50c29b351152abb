"""What is mounted where, and what the mount table promises."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Mount:
    """One line of /proc/self/mountinfo. ``options`` are the mount's and the file system's, merged."""

    device_number: str
    """``major:minor`` of the device underneath; ``0:N`` for what has none (tmpfs, overlay)."""
    mount_point: str
    root: str
    """The directory of the file system that shows here: ``/`` unless this is a bind mount."""
    fs_type: str
    source: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class FstabEntry:
    """One line of /etc/fstab that is not a comment."""

    spec: str
    mount_point: str
    fs_type: str
    options: tuple[str, ...]
    line_number: int


_ESCAPE = re.compile(r"\\([0-7]{3})")


def unescape(text: str) -> str:
    """``\\040`` back to a blank, as mountinfo, swaps and fstab write it."""
    return _ESCAPE.sub(lambda match: chr(int(match.group(1), 8)), text)


def parse_mountinfo(text: str) -> list[Mount]:
    """Every mount, in mount order (a later one at the same place hides the earlier)."""
    mounts = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        before, after = left.split(), right.split()
        if not separator or len(before) < 6 or len(after) < 2:
            continue
        options = before[5].split(",")
        if len(after) > 2:
            options += [option for option in after[2].split(",") if option not in options]
        mounts.append(
            Mount(
                device_number=before[2],
                mount_point=unescape(before[4]),
                root=unescape(before[3]),
                fs_type=after[0],
                source=unescape(after[1]),
                options=tuple(options),
            )
        )
    return mounts


def read_mounts(root: str = "/") -> list[Mount]:
    """The mounts that this process sees; empty when /proc is not there."""
    try:
        with open(os.path.join(root, "proc/self/mountinfo"), encoding="utf-8", errors="surrogateescape") as stream:
            return parse_mountinfo(stream.read())
    except OSError:
        return []


def mount_at(mount_point: str, mounts: list[Mount]) -> Mount | None:
    """The topmost mount exactly at ``mount_point``, or None."""
    wanted = os.path.normpath(mount_point)
    found = None
    for mount in mounts:
        if os.path.normpath(mount.mount_point) == wanted:
            found = mount
    return found


def mount_holding(path: str, mounts: list[Mount]) -> Mount | None:
    """The mount that ``path`` (absolute, links resolved by the caller) lies on, or None."""
    wanted = os.path.normpath(path)
    best = None
    for mount in mounts:
        point = os.path.normpath(mount.mount_point)
        prefix = point if point.endswith("/") else point + "/"
        inside = wanted == point or wanted.startswith(prefix)
        if inside and (best is None or len(point) >= len(os.path.normpath(best.mount_point))):
            best = mount
    return best


def parse_fstab(text: str) -> list[FstabEntry]:
    """Every entry of an fstab; comments and malformed lines are left out."""
    entries = []
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.split()
        if len(fields) < 4 or fields[0].startswith("#"):
            continue
        entries.append(
            FstabEntry(
                spec=unescape(fields[0]),
                mount_point=unescape(fields[1]),
                fs_type=fields[2],
                options=tuple(fields[3].split(",")),
                line_number=number,
            )
        )
    return entries
