"""Files that keep huge pages and the limit on locked memory over a boot: tmpfiles.d, limits.d,
systemd's, and the line of /dev/shm in /etc/fstab.
"""

from __future__ import annotations

import re
from typing import Sequence

from ..machine.fstab import FstabConflict, entries_at, with_entry
from ..machine.memory import HugePages

TMPFILES_PATH = "/etc/tmpfiles.d/60-tunetool-hugepages.conf"
LIMITS_PATH = "/etc/security/limits.d/60-tunetool-memlock.conf"
SYSTEMD_PATHS = (
    "/etc/systemd/system.conf.d/60-tunetool-memlock.conf",
    "/etc/systemd/user.conf.d/60-tunetool-memlock.conf",
)
_HEADER = "# Written by tunetool (role host_memory); changes here are lost at its next run.\n"


def render_tmpfiles(pools: Sequence[HugePages]) -> str:
    """Lines for tmpfiles.d, which, unlike vm.nr_hugepages, support every page size and NUMA node."""
    lines = ["w %s - - - - %d\n" % (pool.path, pool.count) for pool in pools]
    return _HEADER + "".join(lines)


_POOL_LINE = re.compile(
    r"^w /sys/(?:kernel/mm|devices/system/node/node(?P<node>\d+))/hugepages/hugepages-(?P<size>\d+)kB/nr_hugepages"
    r" - - - - (?P<count>\d+)$"
)


def parse_tmpfiles(text: str) -> list[HugePages]:
    """The pools of a file that ``render_tmpfiles`` wrote; other lines are ignored."""
    matches = [match for match in map(_POOL_LINE.match, text.splitlines()) if match]
    return [
        HugePages(int(pool["size"]), int(pool["count"]), None if pool["node"] is None else int(pool["node"]))
        for pool in matches
    ]


def pools_to_give_back(
    before: Sequence[HugePages], asked: Sequence[HugePages], nodes: Sequence[int]
) -> list[HugePages]:
    """Pools of an earlier run that are no longer asked for, to be emptied.

    The pool over all NUMA nodes is the sum of theirs: one asked for settles all of them, and where single nodes take
    its place the others give back their share.
    """
    left: dict[str, HugePages] = {}
    for pool in before:
        nodes_asked = {pool_asked.numa_node for pool_asked in asked if pool_asked.size_kib == pool.size_kib}
        if None in nodes_asked or pool.numa_node in nodes_asked:
            continue
        if pool.numa_node is None and nodes_asked:
            unasked = [HugePages(pool.size_kib, 0, node) for node in nodes if node not in nodes_asked]
        else:
            unasked = [HugePages(pool.size_kib, 0, pool.numa_node)]
        left.update((unasked_pool.path, unasked_pool) for unasked_pool in unasked)
    return list(left.values())


def render_limits(memlock: str) -> str:
    """Lines for limits.d, for logins. ``*`` does not cover root, so root has its own lines (limits.conf(5))."""
    rows = ["%s %s memlock %s\n" % (who, kind, memlock) for who in ("*", "root") for kind in ("soft", "hard")]
    return _HEADER + "".join(rows)


def render_systemd(memlock: str) -> str:
    """Text for system.conf.d and user.conf.d, for services, to which PAM's limits do not apply."""
    value = "infinity" if memlock == "unlimited" else str(int(memlock) * 1024)
    return _HEADER + "[Manager]\nDefaultLimitMEMLOCK=%s\n" % value


POINT = "/dev/shm"
POLICIES = ("always", "within_size", "advise", "never")
"""Values of ``huge=`` (tmpfs(5))."""


def with_shm(text: str, size: int | None, huge: str | None) -> str:
    """fstab with the size (bytes) and the huge pages of /dev/shm; None leaves what an entry has.

    ``huge``: empty takes the option away. A size replaces all other options of the entry, ``huge`` alone keeps them.
    Raises ``FstabConflict`` for two entries, and where ``huge`` alone would change an entry that is no tmpfs.
    """
    present = entries_at(text, POINT)
    before = list(present[0].options) if present else []
    kept = [option for option in before if option.startswith("huge=")]
    asked = kept if huge is None else ["huge=%s" % huge] if huge else []
    if size is not None:
        others = ["nosuid", "nodev", "size=%d" % size]
    elif asked == kept:
        return text
    elif present and present[0].fs_type != "tmpfs":
        raise FstabConflict("/etc/fstab line %d mounts no tmpfs at `%s`" % (present[0].line_number, POINT))
    else:
        others = [option for option in before if option not in kept] or ["nosuid", "nodev"]
    return with_entry(text, "tmpfs", POINT, "tmpfs", ",".join(others + asked), replace_any_spec=True)
