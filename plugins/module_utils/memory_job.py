"""Huge pages, /dev/shm and locked memory brought to what is asked: compared first, changed where they differ."""

from __future__ import annotations

import os
import re
from typing import Any, Mapping

from .commands import run
from .drift import Ledger
from .files import content, replace_file
from .fstab import FSTAB, FstabConflict, with_entry
from .memory import (
    LIMITS_PATH,
    SYSTEMD_PATHS,
    TMPFILES_PATH,
    HugePages,
    hugepage_sizes,
    memory_total,
    numa_nodes,
    parse_tmpfiles,
    pools_to_give_back,
    read_hugepages,
    render_limits,
    render_systemd,
    render_tmpfiles,
    shm_bytes,
)
from .mounts import mount_at, read_mounts
from .refusal import Refusal
from .units import format_size_binary, parse_size

PAGE = os.sysconf("SC_PAGE_SIZE")

ARGUMENTS: dict[str, Any] = {
    "hugepages": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "size": {"type": "str", "default": "2MiB"},
            "count": {"type": "int", "required": True},
            "numa_node": {"type": "int"},
        },
    },
    "hugepages_max_share": {"type": "int", "default": 50},
    "shm_size": {"type": "str", "default": ""},
    "memlock": {"type": "str", "default": ""},
}
"""What M(tunetool.node.host_memory) takes."""


class MemoryJob:
    """The three settings of a machine under ``root``."""

    def __init__(self, wanted: Mapping[str, Any], ledger: Ledger, root: str = "/") -> None:
        self.wanted = wanted
        self.ledger = ledger
        self.root = root

    def _path(self, path: str) -> str:
        return os.path.join(self.root, path.lstrip("/"))

    def all(self) -> dict[str, Any]:
        """The three in turn; returns what was asked for, as the manifest holds it."""
        pools = self.hugepages()
        return {
            "hugepages": [
                {"size_kib": pool.size_kib, "numa_node": pool.numa_node, "count": pool.count} for pool in pools
            ],
            "shm_bytes": self.shm(),
            "memlock": self.memlock(),
        }

    def put(self, name: str, path: str, text: str) -> bool:
        """A file with exactly this text; true when it was written."""
        before = content(self._path(path))
        if self.ledger.file_differs(name, path, before, text):
            replace_file(self._path(path), text)
            return True
        return False

    def hugepages(self) -> list[HugePages]:
        """Pools sized now through sysfs and at boot through tmpfiles.d; those no longer asked for are given back."""
        pools = [
            HugePages(parse_size(entry["size"] or "2MiB") // 1024, entry["count"], entry["numa_node"])
            for entry in self.wanted["hugepages"]
        ]
        self._refuse_impossible(pools)
        # The manifest too: a run that could not free a pool has already rewritten the file.
        before = parse_tmpfiles(content(self._path(TMPFILES_PATH)))
        if self.ledger.manifest is not None:
            before += [HugePages(**entry) for entry in self.ledger.manifest["memory"]["hugepages"]]
        if pools or os.path.exists(self._path(TMPFILES_PATH)):
            self.put("memory.hugepages.boot", TMPFILES_PATH, render_tmpfiles(pools))
        for pool in pools_to_give_back(before, pools, numa_nodes(self.root)):
            if read_hugepages(pool, self.root) is not None:
                self._resize(pool, "pages of it are in use: end the job that holds them, or reboot")
        for pool in pools:
            self._resize(pool, "reboot while memory is whole (they are set for the next boot), or ask for fewer")
        return pools

    def _resize(self, pool: HugePages, hint: str) -> None:
        name = "memory.hugepages[%s]" % pool.label
        found = read_hugepages(pool, self.root)
        expected = "%d pages" % pool.count
        if not self.ledger.differs(name, expected, "%s pages" % found, pool.path, "%s\n" % found, "%d\n" % pool.count):
            return
        with open(self._path(pool.path), "w", encoding="ascii") as stream:
            stream.write("%d" % pool.count)
        found = read_hugepages(pool, self.root)
        if found != pool.count:
            self.ledger.give_up(
                name,
                "%s pages" % found,
                hint,
                "%d huge pages of %s asked for, the kernel has %s. hint: %s"
                % (pool.count, format_size_binary(pool.size_kib * 1024), found, hint),
            )

    def _refuse_impossible(self, pools: list[HugePages]) -> None:
        offered = hugepage_sizes(self.root)
        for pool in pools:
            if pool.size_kib not in offered:
                sizes = ", ".join(format_size_binary(size * 1024) for size in offered) or "none"
                raise Refusal(
                    "huge pages of %s are not offered by this kernel (%s). hint: 1 GiB pages need "
                    "`hugepagesz=1G` on the kernel command line" % (format_size_binary(pool.size_kib * 1024), sizes)
                )
            if read_hugepages(pool, self.root) is None:
                raise Refusal("NUMA node %s does not exist here. hint: see `lscpu`" % pool.numa_node)
        asked, total = sum(p.bytes for p in pools), memory_total(self.root)
        share = self.wanted["hugepages_max_share"]
        if asked * 100 > total * share:
            raise Refusal(
                "huge pages would take %s of %s RAM, more than %d %%. hint: ask for fewer, or raise "
                "`host_memory_hugepages_max_share`" % (format_size_binary(asked), format_size_binary(total), share)
            )

    def shm(self) -> int | None:
        """An fstab line for later boots, a remount for now. Returns the size in bytes."""
        text = self.wanted["shm_size"]
        if not text:
            return None
        size = shm_size_bytes(text, self.root)
        if mount_at("/dev/shm", read_mounts(self.root)) is None:
            raise Refusal("`/dev/shm` is not mounted. hint: look at the node first")
        before = content(self._path(FSTAB))
        try:
            after = with_entry(
                before, "tmpfs", "/dev/shm", "tmpfs", "nosuid,nodev,size=%d" % size, replace_any_spec=True
            )
        except FstabConflict as error:
            self.ledger.cannot("fstab[/dev/shm]", "one line", str(error), "leave one of them", str(error))
            after = before
        if self.ledger.file_differs("fstab[/dev/shm]", FSTAB, before, after):
            replace_file(self._path(FSTAB), after)
            if os.path.isdir("/run/systemd/system"):
                run(["systemctl", "daemon-reload"])
        live = shm_bytes(self.root)
        found = format_size_binary(live) if live is not None else "no tmpfs"
        if self.ledger.differs(
            "memory.shm", format_size_binary(size), found, "/dev/shm", "size %s\n" % live, "size %d\n" % size
        ):
            run(["mount", "-o", "remount,size=%d" % size, "/dev/shm"])
            if shm_bytes(self.root) != size:
                raise Refusal("`/dev/shm` has %s bytes after its remount, %d asked for" % (shm_bytes(), size))
        return size

    def memlock(self) -> str | None:
        """limits.d for logins, DefaultLimitMEMLOCK for services. Returns it as limits.conf(5) writes it."""
        text = self.wanted["memlock"]
        if not text:
            return None
        value = "unlimited" if text == "unlimited" else str(parse_size(text) // 1024)
        self.put("memory.memlock[limits.d]", LIMITS_PATH, render_limits(value))
        written = [
            self.put("memory.memlock[%s]" % path.split("/")[-2], path, render_systemd(value)) for path in SYSTEMD_PATHS
        ]
        if any(written) and os.path.isdir("/run/systemd/system"):
            # A reload does not reread [Manager]; running services keep their limits until they restart.
            run(["systemctl", "daemon-reexec"])
        return value


def shm_size_bytes(text: str, root: str = "/") -> int:
    """Bytes, whole pages, from a size or a share of the RAM."""
    share = re.match(r"^(\d{1,2})%$", text)
    if share and int(share.group(1)) > 0:
        size = memory_total(root) * int(share.group(1)) // 100
    elif share or text.endswith("%"):
        raise Refusal("`%s` is not a share of the RAM. hint: 1%% to 99%%" % text)
    else:
        size = parse_size(text)
    if size < PAGE:
        raise Refusal("`/dev/shm` cannot have %d bytes. hint: write `50%%` or `64GiB`" % size)
    return size // PAGE * PAGE
