"""Finds what else on this machine asks for huge pages at boot: sysctl.d."""

from __future__ import annotations

from typing import Sequence

from ..common.boot_files import location, sysctl_lines
from ..common.kernel_numbers import whole
from ..machine.memory import HugePages, default_hugepage_kib

_KEYS = ("vm.nr_hugepages", "vm.nr_hugepages_mempolicy")


def rivals(pools: Sequence[HugePages], root: str = "/") -> list[str]:
    """A warning where sysctl.d asks for another number of pages of a size that is asked for here; of its lines the last
    one holds.

    systemd reads sysctl.d before tmpfiles.d, so that ours hold after a boot; every later `sysctl --system` ends that.
    """
    size = default_hugepage_kib(root)
    asked = [pool for pool in pools if pool.size_kib == size]
    lines = [each for each in sysctl_lines(root) if each[2] in _KEYS]
    if not asked or not lines:
        return []
    path, number, _key, line = lines[-1]
    count = sum(pool.count for pool in asked)
    if whole(line.partition("=")[2].strip()) == count:
        return []
    return [
        "huge pages: %s has `%s`, and %d pages are asked for here. A boot ends with ours, and `sysctl --system` with "
        "those: remove that line" % (location(path, number, root), line, count)
    ]
