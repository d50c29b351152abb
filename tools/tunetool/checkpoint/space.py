"""Room for a checkpoint, asked before anything is written: on the medium, and in memory."""

from __future__ import annotations

import os
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.node.files import read_int, read_text
from tunetool.node.mounts import mount_holding, read_mounts
from tunetool.node.units import format_size

_IN_MEMORY = ("tmpfs", "ramfs")


def free(directory: Path) -> int:
    """Bytes that this user may still write to where ``directory`` is or will be. A quota is not in it."""
    place = _existing(directory)
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


def need(directory: Path, count: int) -> None:
    """Raises ``CannotJudge`` when ``count`` more bytes do not fit; on a memory file system, into RAM neither."""
    available = free(directory)
    of_what = "space"
    mount = mount_holding(str(_existing(directory).resolve()), read_mounts())
    if mount is not None and mount.fs_type in _IN_MEMORY:
        memory = host_memory_left()
        if memory < available:
            available, of_what = memory, f"memory, and it is a {mount.fs_type}"
    if count > available:
        raise CannotJudge(
            f"`{directory}` has {format_size(available)} of {of_what} left; {format_size(count)} are to be written",
            "remove old checkpoints, or save elsewhere; an old one is only replaced when the new one is complete",
        )


def host_memory_left(root: Path = Path("/")) -> int:
    """Bytes of RAM that this process may still take: of the machine, and of every control group that it is in.

    Page cache counts as left where it can be dropped; a tmpfs cannot (kernel: Documentation/filesystems/proc.rst,
    MemAvailable; Documentation/admin-guide/cgroup-v2.rst).
    """
    return min([_available(root), *_left_in_groups(root)])


def _existing(directory: Path) -> Path:
    place = directory.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def _text(path: Path) -> str:
    return read_text(str(path)) or ""


def _available(root: Path) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise CannotJudge("`/proc/meminfo` does not tell how much memory is left", "mount /proc")


def _left_in_groups(root: Path) -> list[int]:
    """What the limits of this process's group and of the groups around it leave; nothing where there is no limit."""
    left = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        # Version 2 names no controllers; a machine can have both.
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        # In a container the name may be the host's. What is mounted at the top is then the container's own group.
        parts = [part for part in name.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            group = top.joinpath(*parts[:depth])
            found = _left_in_v1(group) if controllers else _left_in_v2(group)
            if found is not None:
                left.append(found)
    return left


def _left_in_v2(group: Path) -> int | None:
    limit, used = read_int(str(group / "memory.max")), read_int(str(group / "memory.current"))
    return None if limit is None or used is None else max(0, limit - used + _droppable(group, ""))


def _left_in_v1(group: Path) -> int | None:
    limit, used = read_int(str(group / "memory.limit_in_bytes")), read_int(str(group / "memory.usage_in_bytes"))
    # Version 1 writes "no limit" as a number near 2**63.
    if limit is None or used is None or limit >= 2**60:
        return None
    return max(0, limit - used + _droppable(group, "total_"))


def _droppable(group: Path, prefix: str) -> int:
    """Bytes of page cache that the group is charged for; a tmpfs counts as anonymous memory there."""
    fields = (f"{prefix}inactive_file", f"{prefix}active_file")
    pairs = (line.split() for line in _text(group / "memory.stat").splitlines())
    return sum(int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in fields)
