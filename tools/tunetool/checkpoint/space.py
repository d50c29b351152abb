"""Free space for a checkpoint, checked before anything is written: on the file system, and in host memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tunetool.checkpoint.os_errors import SystemRefused
from tunetool.errors import CannotJudge
from tunetool.node.machine.memory import memory_left
from tunetool.node.machine.mounts import mount_holding, read_mounts
from tunetool.node.units import format_size

_IN_MEMORY = ("tmpfs", "ramfs")


def free(directory: Path) -> int:
    """Bytes that this user can still write to the file system of ``directory``, which need not exist. Ignores
    quotas."""
    existing = _existing(directory)
    status = os.statvfs(existing)
    return status.f_bavail * status.f_frsize


def left(directory: Path) -> tuple[int, str]:
    """Bytes that fit on the file system or, for a tmpfs, in host memory; and what they are of."""
    available, of_what = free(directory), "space"
    mount = mount_holding(str(_existing(directory).resolve()), read_mounts())
    if mount is not None and mount.fs_type in _IN_MEMORY:
        memory = host_memory_left()
        if memory < available:
            available, of_what = memory, f"memory, and it is a {mount.fs_type}"
    return available, of_what


def need(directory: Path, count: int, what: str = "the save") -> None:
    """Raises ``SystemRefused`` if ``count`` more bytes do not fit there. ``what``: that needs them."""
    available, of_what = left(directory)
    if count > available:
        raise SystemRefused.with_number(
            errno.ENOSPC,
            f"`{directory}` has {format_size(available)} of {of_what} left; {what} needs {format_size(count)}",
            "remove old checkpoints, or save elsewhere; a new checkpoint replaces an old one only when it is complete",
        )


def host_memory_left(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process can still allocate, within the limits of all its control groups."""
    memory = memory_left(str(root))
    if memory is None:
        raise CannotJudge("`/proc/meminfo` does not say how much memory is available", "mount /proc")
    return memory[0]


def _existing(directory: Path) -> Path:
    path = directory.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
