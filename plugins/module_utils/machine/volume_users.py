"""Users of a volume: processes of any mount namespace, swap files, loop devices, mounts within it."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass
from typing import Sequence

from ..common.files import entries_of, exact_text, lines, link_target, read_text, whole_number
from .drives import holders_of
from .mounts import DEVICE_NUMBER, parse_mountinfo, plain_path, swap_sources, unescape


@dataclass(frozen=True)
class Process:
    """A process that uses something on the volume."""

    pid: int
    command: str
    how: str

    def __str__(self) -> str:
        return "process %d `%s` (%s)" % (self.pid, self.command, self.how)


@dataclass(frozen=True)
class _VolumeMount:
    """One mount of the volume, as one namespace sees it."""

    mount_id: str
    point: str
    follows: bool
    """Whether an unmount in the first namespace also removes this mount."""


def occupants(device_number: str, device: str, mount_point: str, root: str = "/") -> list[str]:
    """Everything that prevents the volume ``device`` (``major:minor``, kernel name) from being unmounted, a line
    each."""
    mount_point = plain_path(mount_point)
    uses = ["`%s` is mounted in it" % point for point in _mounts_within(mount_point, root)]
    uses += ["it is also mounted at `%s`" % point for point in _other_mount_points(device_number, mount_point, root)]
    uses += ["`%s`, a mount of %s, has its directories in it" % each for each in _stacked("self", mount_point, root)]
    uses += ["swap file `%s`" % path for path in _swap_files(mount_point, root)]
    uses += ["loop device `%s` on `%s`" % pair for pair in _loops(mount_point, root)]
    uses += ["device `%s` is built on it" % holder for holder in holders_of(root, device)]
    return uses + [str(process) for process in processes(device_number, mount_point, root)]


def processes(device_number: str, mount_point: str, root: str = "/") -> list[Process]:
    """Processes with an open file, working directory, program or mapping on the device, or with a mount of it in a
    namespace of their own, sorted by pid."""
    users = []
    stacked: dict[str, str | None] = {}
    of_all = _stacked("self", mount_point, root)
    mounts: dict[str, list[_VolumeMount]] = {}
    first = _namespace("self", root)
    for pid in sorted(pid for pid in map(whole_number, entries_of(os.path.join(root, "proc"))) if pid is not None):
        if pid == os.getpid():
            continue
        namespace = _namespace(str(pid), root)
        # A process whose namespace cannot be read is checked separately.
        key = namespace or str(pid)
        if key not in mounts:
            mounts[key] = _mounts(str(pid), device_number, root)
        how = _how(pid, mounts[key], device_number, root)
        if not how and namespace not in ("", first) and any(not mount.follows for mount in mounts[key]):
            how = "keeps its own mount of it, as a container does"
        if not how and namespace not in ("", first):
            if key not in stacked:
                # What a namespace has of the first one goes with that.
                its = [each for each in _stacked(str(pid), mount_point, root) if each not in of_all]
                stacked[key] = "keeps `%s`, a mount of %s, whose directories are in it" % its[0] if its else None
            how = stacked[key]
        if how:
            users.append(Process(pid, read_text(os.path.join(root, "proc/%d/comm" % pid)) or "?", how))
    return users


def _how(pid: int, mounts: Sequence[_VolumeMount], device_number: str, root: str) -> str | None:
    base = os.path.join(root, "proc", str(pid))
    for link, words in (("cwd", "working directory"), ("root", "root directory"), ("exe", "program")):
        target = link_target(os.path.join(base, link))
        if any(_within(target, mount.point) for mount in mounts):
            return words
    ids = {mount.mount_id for mount in mounts}
    for number in entries_of(os.path.join(base, "fdinfo")):
        match = re.search(r"^mnt_id:\s*(\d+)", read_text(os.path.join(base, "fdinfo", number)) or "", re.MULTILINE)
        if match and match.group(1) in ids:
            return "open file `%s`" % link_target(os.path.join(base, "fd", number))
    numbers = device_number.split(":") if DEVICE_NUMBER.fullmatch(device_number) else []
    # address perms offset dev inode pathname; dev is hexadecimal here.
    mapped = ":".join("%02x" % int(number) for number in numbers)
    for line in lines(exact_text(os.path.join(base, "maps"))):
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[3] == mapped:
            return "mapped file `%s`" % fields[5].rstrip("\n")
    return None


def _mounts(pid: str, device_number: str, root: str) -> list[_VolumeMount]:
    """Mounts of the device, from /proc/PID/mountinfo with its ids and propagation (proc(5))."""
    mounts = []
    for line in lines(exact_text(os.path.join(root, "proc", pid, "mountinfo"))):
        fields = line.rstrip("\n").split(" ")
        if len(fields) > 6 and fields[2] == device_number:
            tags = fields[6 : fields.index("-")] if "-" in fields else []
            follows = any(tag.startswith(("shared:", "master:")) for tag in tags)
            mounts.append(_VolumeMount(fields[0], unescape(fields[4]), follows))
    return mounts


def _mounts_within(mount_point: str, root: str) -> list[str]:
    mounts = parse_mountinfo(exact_text(os.path.join(root, "proc/self/mountinfo")))
    points = [mount.mount_point for mount in mounts]
    return [point for point in points if point != mount_point and _within(point, mount_point)]


def _other_mount_points(device_number: str, mount_point: str, root: str) -> list[str]:
    points = [mount.point for mount in _mounts("self", device_number, root)]
    others = [point for point in points if not _within(point, mount_point)]
    # One umount takes one of them away.
    return others + [point for point in points if point == mount_point][1:]


_LAYERS = ("lowerdir", "lowerdir+", "datadir+", "upperdir", "workdir")
_BETWEEN_LAYERS = re.compile(r"(?<!\\):")


def _stacked(pid: str, mount_point: str, root: str) -> list[tuple[str, str]]:
    """Mount points of file systems that are made of directories below ``mount_point``, with their types.

    The kernel keeps mounts of its own for these, which no other list has and which do not hinder ``umount``.
    """
    found = []
    for mount in parse_mountinfo(exact_text(os.path.join(root, "proc", pid, "mountinfo"))):
        directories = [mount.source] if mount.fs_type == "ecryptfs" else []
        for option in mount.options if mount.fs_type == "overlay" else ():
            name, _, value = option.partition("=")
            if name in _LAYERS:
                directories += [each.replace("\\:", ":") for each in _BETWEEN_LAYERS.split(unescape(value))]
        if any(_within(plain_path(each), mount_point) for each in directories):
            found.append((mount.mount_point, mount.fs_type))
    return found


def _swap_files(mount_point: str, root: str) -> list[str]:
    return [path for path in swap_sources(root) if _within(path, mount_point)]


def _loops(mount_point: str, root: str) -> list[tuple[str, str]]:
    loops = []
    for path in sorted(glob.glob(os.path.join(root, "sys/block/loop*/loop/backing_file"))):
        backing = exact_text(path).rstrip("\n")
        if _within(backing, mount_point):
            loops.append((path.split(os.sep)[-3], backing))
    return loops


def _within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _namespace(pid: str, root: str) -> str:
    return link_target(os.path.join(root, "proc", pid, "ns/mnt"))
