"""Room for a checkpoint, asked before anything is written: on the medium, and in memory."""

from __future__ import annotations

import os
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.node.machine.memory_left import memory_left
from tunetool.node.machine.mounts import mount_holding, read_mounts
from tunetool.node.units import format_size

_IN_MEMORY = ("tmpfs", "ramfs")


def free(directory: Path) -> int:
    """Bytes that this user may still write to where ``directory`` is or will be. A quota is not in it."""
    existing = _existing(directory)
    status = os.statvfs(existing)
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
    """Bytes of RAM that this process may still take: of the machine, and of every control group that it is in."""
    memory = memory_left(str(root))
    if memory is None:
        raise CannotJudge("`/proc/meminfo` does not tell how much memory is left", "mount /proc")
    return memory[0]


def _existing(directory: Path) -> Path:
    path = directory.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
