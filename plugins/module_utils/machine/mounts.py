"""Mounts, from mountinfo."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from ..common.files import exact_text, lines


@dataclass(frozen=True)
class Mount:
    """One line of /proc/self/mountinfo. ``options`` are the mount's and the file system's, merged.

    ``number`` is this mount's, and ``parent`` that of the mount that it lies on.
    """

    device_number: str
    """``major:minor`` of the device; ``0:N`` without one (tmpfs, overlay)."""
    mount_point: str
    root: str
    """The directory of the file system that shows here: ``/`` unless this is a bind mount."""
    fs_type: str
    source: str
    options: tuple[str, ...]
    number: str = ""
    parent: str = ""


DEVICE_NUMBER = re.compile(r"[0-9]{1,10}:[0-9]{1,10}")
"""``major:minor``, as the kernel prints it."""


_ESCAPE = re.compile(rb"\\([0-7]{3})")


def unescape(text: str) -> str:
    """``\\040`` back to a blank, as mountinfo, swaps and fstab write it. Each escape is a byte, not a character."""
    plain = _ESCAPE.sub(lambda match: bytes([int(match.group(1), 8) & 0xFF]), text.encode("utf-8", "surrogateescape"))
    # The programs that read these files are written in C, where a string ends there.
    return plain.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def plain_path(path: str) -> str:
    """An absolute path without doubled or trailing slashes, ``.`` and ``..``; anything else as it is.

    ``os.path.normpath`` keeps two slashes at the beginning: POSIX lets them mean something else, Linux does not.
    """
    return os.path.normpath("/" + path.lstrip("/")) if path.startswith("/") else path


def parse_mountinfo(text: str) -> list[Mount]:
    """Every mount, also those that others hide."""
    mounts = []
    for line in lines(text):
        # By single blanks: a source may be empty, and other white space may be part of a name.
        left, separator, right = line.rstrip("\n").partition(" - ")
        before, after = left.split(" "), right.split(" ")
        if not separator or len(before) < 6 or len(after) < 2 or not DEVICE_NUMBER.fullmatch(before[2]):
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
                number=before[0],
                parent=before[1],
            )
        )
    return mounts


def read_mounts(root: str = "/") -> list[Mount]:
    """The mounts that this process sees; empty when /proc is not there."""
    return parse_mountinfo(exact_text(os.path.join(root, "proc/self/mountinfo")))


def swap_sources(root: str = "/") -> list[str]:
    """Files and devices in use as swap."""
    rows = lines(exact_text(os.path.join(root, "proc/swaps")))[1:]
    return [unescape(re.split(r"[ \t]", line, maxsplit=1)[0]) for line in rows if line.strip()]


def mount_at(mount_point: str, mounts: list[Mount]) -> Mount | None:
    """The mount that shows exactly at ``mount_point``, or None, also where another mount hides it."""
    holding = mount_holding(mount_point, mounts)
    return holding if holding is not None and plain_path(holding.mount_point) == plain_path(mount_point) else None


def volumes_at(mount_point: str, mounts: list[Mount]) -> list[str]:
    """Where the node's file systems are mounted: there, or else in directories of it, a volume in each."""
    if mount_at(mount_point, mounts) is not None:
        return [mount_point]
    inside = {plain_path(mount.mount_point) for mount in mounts if not mount.device_number.startswith("0:")}
    parent = plain_path(mount_point)
    return sorted(point for point in inside if os.path.dirname(point) == parent and mount_at(point, mounts))


def hidden_by(mount_point: str, mounts: list[Mount]) -> Mount | None:
    """The mount that hides what is mounted at ``mount_point``; None if nothing is mounted there, or it shows."""
    wanted = plain_path(mount_point)
    if mount_at(wanted, mounts) is not None or wanted not in [plain_path(mount.mount_point) for mount in mounts]:
        return None
    return mount_holding(wanted, mounts)


def described(mount: Mount) -> str:
    """A mount that is in the way, in words; of a bind mount also which directory of its file system shows."""
    return "a mount of %s`%s`" % ("" if mount.root == "/" else "directory `%s` of " % mount.root, mount.source)


def hiding(over: Mount, point: str) -> tuple[str, str]:
    """What ``hidden_by`` found, in words, and the cure."""
    found = "%s at `%s` hides what is mounted at `%s`" % (described(over), over.mount_point, point)
    return found, "run `umount %s`" % over.mount_point


def place_within(path: str, mount: Mount) -> str:
    """Where ``path``, which lies on ``mount``, is within the file system: two mounts may show one directory."""
    return plain_path(os.path.join(mount.root, os.path.relpath(plain_path(path), plain_path(mount.mount_point))))


def mount_holding(path: str, mounts: list[Mount]) -> Mount | None:
    """The mount that ``path`` (absolute, links resolved by the caller) lies on, or None.

    As the kernel walks: at each directory of the path to the mount that lies there on the mount it has come from. The
    longest mount point is not enough, nor the last line: a mount over a directory hides what was mounted below it, and
    the lines have another order after `mount --move`.
    """
    at: dict[str, list[Mount]] = {}
    for mount in mounts:
        at.setdefault(plain_path(mount.mount_point), []).append(mount)
    numbers = {mount.number for mount in mounts}
    here: Mount | None = None
    for directory in _directories(plain_path(path)):
        waiting = at.get(directory, [])
        while waiting:
            on_it = [mount for mount in waiting if here is not None and mount.parent == here.number != mount.number]
            # What the topmost visible mount lies on is not listed, as that of the root of a container.
            rootless = [mount for mount in waiting if mount.parent not in numbers or mount.parent == mount.number]
            if not on_it and not rootless:
                break
            here = (on_it or rootless)[-1]
            waiting = [mount for mount in waiting if mount not in (on_it or rootless)]
    return here


def _directories(path: str) -> list[str]:
    """`/`, and each directory on the way to ``path``, and ``path``."""
    if not path.startswith("/"):
        return []
    parts = [part for part in path.split("/") if part]
    return ["/"] + ["/" + "/".join(parts[: count + 1]) for count in range(len(parts))]
