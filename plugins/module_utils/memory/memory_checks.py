"""The checks whether huge pages, /dev/shm and the limit of locked memory are as the manifest has them."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from ..common.check_result import UNKNOWN, Check, judged
from ..machine.memory import (
    SHMEM_ENABLED,
    HugePages,
    memlock_limit,
    read_hugepages,
    shm_bytes,
    shm_huge,
    shm_mode,
    shm_read_only,
    tmpfs_policies,
)
from ..units import format_size_binary

HUGEPAGES, SHM, SHM_HUGE, MEMLOCK = "memory.hugepages", "memory.shm", "memory.shm_huge", "memory.memlock"
_NO_JOB_WRITES = "%s: no job can write there"


def check_hugepages(wanted: Sequence[Mapping[str, Any]], root: str = "/") -> list[Check]:
    """One for each pool that was asked for."""
    checks = []
    for entry in wanted:
        pool = HugePages(entry["size_kib"], entry["count"], entry["numa_node"])
        count = read_hugepages(pool, root)
        where = "" if pool.numa_node is None else " on NUMA node %d" % pool.numa_node
        checks.append(
            judged(
                HUGEPAGES,
                count is not None and count >= pool.count,
                "%d pages of %s%s" % (pool.count, format_size_binary(pool.size_kib * 1024), where),
                "%s pages" % count,
                "memory is fragmented or taken: reboot the node, then run `tunetool provision` again",
            )
        )
    return checks


def check_shm(wanted: int, root: str = "/") -> Check:
    """Its size in bytes, and that jobs may write there."""
    size, mode = shm_bytes(root), shm_mode(root)
    found = format_size_binary(size) if size is not None else "no tmpfs at /dev/shm"
    holds, remedy = size is not None and size >= wanted, "run `mount -o remount /dev/shm`"
    # That remount mends the size too.
    if size is not None and shm_read_only(root):
        holds, found, remedy = False, _NO_JOB_WRITES % "mounted read-only", "run `mount -o remount,rw /dev/shm`"
    elif holds and mode is not None and mode & 0o003 != 0o003:
        holds, found, remedy = False, _NO_JOB_WRITES % ("mode %04o" % mode), "run `chmod 1777 /dev/shm`"
    return judged(SHM, holds, format_size_binary(wanted), found, remedy)


def check_shm_huge(wanted: str, root: str = "/") -> Check:
    """Its mount's option ``huge``, and that the kernel does not overrule it."""
    live, (_, override) = shm_huge(root), tmpfs_policies(root)
    denied = override == "deny" and wanted != "never"
    found = "no tmpfs at /dev/shm" if live is None else "huge=%s" % live
    return judged(
        SHM_HUGE,
        live == wanted and not denied,
        "huge=%s" % wanted,
        found + (", and the kernel denies it" if denied else ""),
        "write `never` to `/%s`" % SHMEM_ENABLED if denied else "run `mount -o remount /dev/shm`",
    )


def check_memlock(wanted: str, root: str = "/") -> Check:
    """This session's limit. ``wanted`` is ``unlimited`` or KiB."""
    limit = memlock_limit(root)
    expected = "unlimited" if wanted == "unlimited" else format_size_binary(int(wanted) * 1024)
    if limit is None:
        return Check(MEMLOCK, UNKNOWN, expected, "no limit shown", "is /proc mounted?")
    enough = limit == "unlimited" or (wanted != "unlimited" and int(limit) >= int(wanted) * 1024)
    return judged(
        MEMLOCK,
        enough,
        expected,
        "unlimited" if limit == "unlimited" else format_size_binary(int(limit)),
        "log in again, or restart the service: limits reach new sessions only",
    )
