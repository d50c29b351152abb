"""The host itself: name, kernel, distribution, processors, NUMA nodes and memory."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from ..common.files import read_int, read_text
from .distribution import parse_os_release
from .memory import (
    HugePages,
    hugepage_sizes,
    meminfo,
    memlock_limit,
    memory_limit,
    memory_total,
    numa_nodes,
    read_hugepages,
    shm_bytes,
    shm_huge,
    tmpfs_policies,
)


@dataclass(frozen=True)
class Host:
    """Each field is None if unknown."""

    name: str | None
    kernel: str | None
    distribution: str | None
    machine: str | None
    """Vendor and product, as the firmware reports them."""
    cpu: str | None
    sockets: int | None
    cpus: int | None
    numa: tuple[tuple[int, str], ...]
    """Each node with its list of CPUs."""
    virtual: bool
    """Whether a hypervisor runs beneath, which decides what PCIe links show."""


@dataclass(frozen=True)
class Pool:
    """Huge pages of one size on one NUMA node."""

    pages: HugePages
    free: int | None


@dataclass(frozen=True)
class Memory:
    """Bytes; None if unknown."""

    total: int | None
    available: int | None
    cgroup_limit: int | None
    shm: int | None
    shm_huge: str | None
    """``huge=`` of /dev/shm; None also where the kernel has no huge pages for it."""
    memlock: str | None
    """``unlimited`` or bytes."""
    pools: tuple[Pool, ...]


def read_host(root: str = "/") -> Host:
    """Facts of the host."""
    release = parse_os_release(
        read_text(os.path.join(root, "etc/os-release")) or read_text(os.path.join(root, "usr/lib/os-release")) or ""
    )
    text = read_text(os.path.join(root, "proc/cpuinfo")) or ""
    sockets = set(re.findall(r"^physical id\s*:\s*(\d+)", text, re.MULTILINE))
    firmware = [read_text(os.path.join(root, "sys/class/dmi/id", name)) for name in ("sys_vendor", "product_name")]
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", text, re.MULTILINE)
    nodes = "sys/devices/system/node/node%d/cpulist"
    return Host(
        name=read_text(os.path.join(root, "proc/sys/kernel/hostname")),
        kernel=read_text(os.path.join(root, "proc/sys/kernel/osrelease")),
        distribution=release.get("PRETTY_NAME") or release.get("ID"),
        machine=" ".join(part for part in firmware if part) or None,
        cpu=" ".join(model.group(1).split()) if model else None,
        sockets=len(sockets) or None,
        cpus=_count(read_text(os.path.join(root, "sys/devices/system/cpu/online"))),
        numa=tuple((node, read_text(os.path.join(root, nodes % node)) or "") for node in numa_nodes(root)),
        virtual=bool(flags and "hypervisor" in flags.group(1).split()),
    )


def read_memory(root: str = "/") -> Memory:
    """Facts of the memory. Pools without pages are left out."""
    nodes: list[int | None] = [*numa_nodes(root)] or [None]
    pools = []
    for size in hugepage_sizes(root):
        for node in nodes:
            count = read_hugepages(HugePages(size, 0, node), root)
            if count:
                pages = HugePages(size, count, node)
                path = os.path.join(root, pages.path.lstrip("/")).replace("nr_hugepages", "free_hugepages")
                pools.append(Pool(pages, read_int(path)))
    return Memory(
        total=memory_total(root) or None,
        available=meminfo("MemAvailable", root),
        cgroup_limit=memory_limit(root),
        shm=shm_bytes(root),
        shm_huge=shm_huge(root) if tmpfs_policies(root)[0] else None,
        memlock=memlock_limit(root),
        pools=tuple(pools),
    )


def _count(text: str | None) -> int | None:
    """Number of values in a list such as ``0-55,112-167``."""
    total = 0
    for part in (text or "").split(","):
        match = re.match(r"^([0-9]{1,9})(?:-([0-9]{1,9}))?$", part.strip())
        if not match:
            return None
        total += int(match.group(2) or match.group(1)) - int(match.group(1)) + 1
    return total if total > 0 else None
