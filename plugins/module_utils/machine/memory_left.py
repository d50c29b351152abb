"""RAM that this process can still use: of the machine, and of every control group around it."""

from __future__ import annotations

import os
from typing import Iterator, Tuple

from ..common.files import read_int, read_text, whole_number
from .memory import meminfo

_NO_LIMIT = 2**60
"""cgroup v1 writes "no limit" as a number near 2**63."""


def memory_left(root: str = "/") -> tuple[int, str] | None:
    """Bytes, and what sets that limit: ``RAM`` or the path of a control group. None if unknown.

    Page cache that can be dropped counts as free; files in a tmpfs cannot be dropped (kernel:
    Documentation/filesystems/proc.rst, MemAvailable; Documentation/admin-guide/cgroup-v2.rst).
    """
    limits = []
    available = meminfo("MemAvailable", root)
    if available is not None:
        limits.append((available, "RAM"))
    limits += _left_in_groups(root)
    return min(limits) if limits else None


def bytes_left(root: str = "/") -> int:
    """Bytes alone; 0 where nothing says."""
    left = memory_left(root)
    return left[0] if left else 0


def groups_usage(root: str = "/") -> list[tuple[str, int]]:
    """Each memory control group that this process is in, the topmost first, with the bytes that it could not drop."""
    usage = []
    for group, (_, used_name, prefix) in _groups(root):
        path = os.path.join(root, group.lstrip("/"))
        used = read_int(os.path.join(path, used_name))
        if used is not None:
            usage.append((group, max(0, used - _droppable(path, prefix))))
    return usage


def _left_in_groups(root: str) -> list[tuple[int, str]]:
    left = []
    for group, files in _groups(root):
        count = _left(os.path.join(root, group.lstrip("/")), *files)
        if count is not None:
            left.append((count, group))
    return left


_Files = Tuple[Tuple[str, ...], str, str]
_FILES_1: _Files = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")
# Above `memory.high` no process is ended, but each is held until memory is freed: a tmpfs frees none.
_FILES_2: _Files = (("memory.max", "memory.high"), "memory.current", "")


def _groups(root: str) -> Iterator[tuple[str, _Files]]:
    for line in (read_text(os.path.join(root, "proc/self/cgroup")) or "").splitlines():
        _, controllers, name = (line.split(":", 2) + ["", ""])[:3]
        if not name:
            continue
        # Version 2 names no controllers; a machine can have both.
        if controllers and "memory" not in controllers.split(","):
            continue
        top = "/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup"
        # In a container the name may be the host's: the mounted top directory is then the container's own group.
        parts = [part for part in name.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            yield "/".join([top] + parts[:depth]), _FILES_1 if controllers else _FILES_2


def memory_limit(root: str = "/") -> int | None:
    """Bytes that the tightest control group around this process allows; None without a limit."""
    # A recording has the top directories alone.
    groups = list(_groups(root)) or [("/sys/fs/cgroup", _FILES_2), ("/sys/fs/cgroup/memory", _FILES_1)]
    limits = [_limit(os.path.join(root, group.lstrip("/")), names) for group, (names, _, _) in groups]
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(group: str, names: tuple[str, ...]) -> int | None:
    limits = [read_int(os.path.join(group, name)) for name in names]
    return min((limit for limit in limits if limit is not None and 0 <= limit < _NO_LIMIT), default=None)


def _left(group: str, limit_names: tuple[str, ...], used_name: str, prefix: str) -> int | None:
    limit, used = _limit(group, limit_names), read_int(os.path.join(group, used_name))
    if limit is None or used is None:
        return None
    return max(0, limit - used + _droppable(group, prefix))


def _droppable(group: str, prefix: str) -> int:
    """Page cache that the group is charged for; a tmpfs counts as anonymous memory there."""
    wanted = (prefix + "inactive_file", prefix + "active_file")
    pairs = [line.split() for line in (read_text(os.path.join(group, "memory.stat")) or "").splitlines()]
    return sum(whole_number(pair[1]) or 0 for pair in pairs if len(pair) == 2 and pair[0] in wanted)
