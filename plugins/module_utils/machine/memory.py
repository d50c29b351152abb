"""The present state of huge pages, /dev/shm, RAM and locked memory; the RAM that control groups leave to us."""

from __future__ import annotations

import glob
import os
import re
import stat
from dataclasses import dataclass
from typing import Iterator, Sequence, Tuple

from ..common.files import read_int, read_text, whole_number
from ..units import format_size_binary
from .mounts import mount_at, read_mounts

GIGANTIC_KIB = 2**20
"""1 GiB: larger than the kernel's allocator supports, so only certain at boot, by the kernel's command line."""


@dataclass(frozen=True)
class HugePages:
    """A pool: ``count`` pages of ``size_kib`` on one NUMA node, or over all of them when ``numa_node`` is None."""

    size_kib: int
    count: int
    numa_node: int | None = None

    @property
    def path(self) -> str:
        """The sysfs file that sizes the pool (kernel: Documentation/admin-guide/mm/hugetlbpage.rst)."""
        base = "/sys/kernel/mm" if self.numa_node is None else "/sys/devices/system/node/node%d" % self.numa_node
        return "%s/hugepages/hugepages-%dkB/nr_hugepages" % (base, self.size_kib)

    @property
    def gigantic(self) -> bool:
        """Whether only the kernel's command line reserves it with certainty."""
        return self.size_kib >= GIGANTIC_KIB

    @property
    def label(self) -> str:
        """The pool's name for people."""
        size = format_size_binary(self.size_kib * 1024).replace(" ", "")
        return size if self.numa_node is None else "%s,node%d" % (size, self.numa_node)

    @property
    def bytes(self) -> int:
        """RAM in bytes that the pool takes."""
        return self.size_kib * 1024 * self.count


def read_hugepages(pool: HugePages, root: str = "/") -> int | None:
    """Number of pages in the pool; None if the kernel has no such pool."""
    return read_int(os.path.join(root, pool.path.lstrip("/")))


def hugepage_sizes(root: str = "/") -> list[int]:
    """Page sizes in KiB that this kernel offers."""
    return _numbered(os.path.join(root, "sys/kernel/mm/hugepages"), "hugepages-", "kB")


def _numbered(directory: str, before: str, after: str = "") -> list[int]:
    """The numbers in names of a directory that are text, number, text; sorted."""
    names = glob.glob(os.path.join(directory, before + "[0-9]*" + after))
    middles = [os.path.basename(name)[len(before) :] for name in names]
    numbers = [whole_number(middle[: -len(after)] if after else middle) for middle in middles]
    return sorted(number for number in numbers if number is not None)


def default_hugepage_kib(root: str = "/") -> int:
    """Size in KiB of the pages that vm.nr_hugepages counts; 0 if the kernel has none."""
    return (meminfo("Hugepagesize", root) or 0) // 1024


def memory_total(root: str = "/") -> int:
    """MemTotal in bytes; 0 without /proc."""
    return meminfo("MemTotal", root) or 0


def meminfo(name: str, root: str = "/") -> int | None:
    """A line of /proc/meminfo in bytes; None where it is not there, or is no number."""
    text = read_text(os.path.join(root, "proc/meminfo")) or ""
    match = re.search(r"^%s:\s+(%s) kB" % (re.escape(name), _KIB), text, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None


_KIB = "[0-9]{1,17}"


def numa_nodes(root: str = "/") -> list[int]:
    """Numbers of the NUMA nodes."""
    return _numbered(os.path.join(root, "sys/devices/system/node"), "node")


def node_memory(node: int, root: str = "/") -> int:
    """RAM of one NUMA node in bytes; 0 if it has none or it is unknown."""
    path = os.path.join(root, "sys/devices/system/node/node%d/meminfo" % node)
    match = re.search(r"MemTotal:\s+(%s) kB" % _KIB, read_text(path) or "")
    return int(match.group(1)) * 1024 if match else 0


def bytes_on_node(pools: Sequence[HugePages], node: int, nodes: int) -> int:
    """Bytes that pools take of one of ``nodes`` NUMA nodes. The kernel spreads a pool without a node evenly."""
    on_this_node = sum(pool.bytes for pool in pools if pool.numa_node == node)
    return on_this_node + sum(pool.bytes for pool in pools if pool.numa_node is None) // nodes


def shm_bytes(root: str = "/") -> int | None:
    """Size of the tmpfs at /dev/shm in bytes; None if none is mounted there.

    tmpfs shows ``size=`` in KiB, and leaves it out at its default of half the RAM (kernel:
    Documentation/filesystems/tmpfs.rst).
    """
    mount = mount_at("/dev/shm", read_mounts(root))
    if mount is None or mount.fs_type != "tmpfs":
        return None
    for option in mount.options:
        match = re.match(r"size=(%s)k$" % _KIB, option)
        if match:
            return int(match.group(1)) * 1024
    return memory_total(root) // 2


def shm_read_only(root: str = "/") -> bool:
    """Whether the kernel has what is mounted at /dev/shm as read-only."""
    mount = mount_at("/dev/shm", read_mounts(root))
    return mount is not None and "ro" in mount.options


def shm_mode(root: str = "/") -> int | None:
    """Permissions of /dev/shm; None if it is not there, or of a recorded machine: they are of whoever laid it out."""
    if not _of_this_machine(root):
        return None
    try:
        return stat.S_IMODE(os.stat(os.path.join(root, "dev/shm")).st_mode)
    except OSError:
        return None


def _of_this_machine(root: str) -> bool:
    return root == "/"


def shm_huge(root: str = "/") -> str | None:
    """When the tmpfs at /dev/shm uses huge pages (mount option ``huge=``); None if none is mounted there.

    tmpfs leaves the option out where it is ``never``.
    """
    mount = mount_at("/dev/shm", read_mounts(root))
    if mount is None or mount.fs_type != "tmpfs":
        return None
    return next((option[len("huge=") :] for option in mount.options if option.startswith("huge=")), "never")


SHMEM_ENABLED = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
"""Kernel: Documentation/admin-guide/mm/transhuge.rst. The file exists where tmpfs can have huge pages (Linux 4.8)."""


def tmpfs_policies(root: str = "/") -> tuple[list[str], str | None]:
    """The values that ``huge=`` of a tmpfs can have on this kernel, and ``deny`` or ``force`` where that overrides it.

    No values where the kernel or the processor has no huge pages for a tmpfs.
    """
    words = (read_text(os.path.join(root, SHMEM_ENABLED)) or "").split()
    selected = next((word[1:-1] for word in words if word.startswith("[")), None)
    policies = [word for word in (word.strip("[]") for word in words) if word not in ("deny", "force")]
    return policies, selected if selected in ("deny", "force") else None


def shm_used(root: str = "/") -> int:
    """Bytes of /dev/shm in use; it cannot be made smaller than that."""
    usage = os.statvfs(os.path.join(root, "dev/shm"))
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize


def memlock_limit(root: str = "/") -> str | None:
    """Soft limit of this process on locked memory: ``unlimited`` or bytes."""
    text = read_text(os.path.join(root, "proc/self/limits")) or ""
    match = re.search(r"^Max locked memory\s+(unlimited|[0-9]{1,20})\s", text + "\n", re.MULTILINE)
    return match.group(1) if match else None


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
