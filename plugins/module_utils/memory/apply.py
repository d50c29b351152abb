"""Brings huge pages, /dev/shm and locked memory to what is asked: compares first, then changes what differs."""

from __future__ import annotations

import os
from typing import Any, Mapping

from ..common.commands import CommandError, run
from ..common.drift import Job, Ledger
from ..common.files import content, replace_file
from ..common.refusal import Refusal
from ..machine.fstab import FSTAB, FstabConflict
from ..machine.memory import (
    SHMEM_ENABLED,
    HugePages,
    memory_total,
    numa_nodes,
    read_hugepages,
    shm_bytes,
    shm_huge,
    shm_used,
    tmpfs_policies,
)
from ..machine.mounts import mount_at, read_mounts
from ..units import format_size_binary, parse_size
from .apply_kernel_parameters import CommandLine
from .limits import memory_problems, refuse_impossible, rivals, shm_share
from .persistent_files import (
    LIMITS_PATH,
    POINT,
    POLICIES,
    SYSTEMD_PATHS,
    TMPFILES_PATH,
    parse_tmpfiles,
    pools_to_give_back,
    render_limits,
    render_systemd,
    render_tmpfiles,
    with_shm,
)

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
    "shm_huge": {"type": "str", "default": "", "choices": ["", *POLICIES]},
    "memlock": {"type": "str", "default": ""},
}
"""Arguments of M(tunetool.node.host_memory)."""


class MemoryJob(Job):
    """The three settings of a machine under ``root``."""

    def __init__(self, wanted: Mapping[str, Any], ledger: Ledger, root: str = "/") -> None:
        super().__init__(ledger, root)
        self.wanted = wanted
        self.reboot_reasons: list[str] = []
        """Settings that take effect only after a reboot."""

    def all(self) -> dict[str, Any]:
        """Bring all three to what is asked. Returns the settings as the manifest holds them."""
        problems = memory_problems(self.wanted)
        if problems:
            raise Refusal("; ".join(problems))
        pools = self.hugepages()
        return {
            "hugepages": [
                {"size_kib": pool.size_kib, "numa_node": pool.numa_node, "count": pool.count} for pool in pools
            ],
            **self.shm(),
            "memlock": self.memlock(),
        }

    def put(self, name: str, path: str, text: str) -> bool:
        """Bring a file to exactly this text. Returns whether it was written."""
        before = content(self._path(path))
        if self.ledger.file_differs(name, path, before, text):
            replace_file(self._path(path), text)
            return True
        return False

    def hugepages(self) -> list[HugePages]:
        """Size the pools now, and at boot through tmpfiles.d and, for 1 GiB pages, the kernel's command line.

        Frees pools that are no longer asked for.
        """
        pools = [
            HugePages(parse_size(entry["size"] or "2MiB") // 1024, entry["count"], entry["numa_node"])
            for entry in self.wanted["hugepages"]
        ]
        refuse_impossible(pools, self.wanted["hugepages_max_share"], self.root)
        # The manifest too: a run that could not free a pool has already rewritten the file.
        before = parse_tmpfiles(content(self._path(TMPFILES_PATH)))
        if self.ledger.manifest is not None:
            before += [HugePages(**entry) for entry in self.ledger.manifest["memory"]["hugepages"]]
        self.ledger.warnings += rivals(pools, self.root)
        line = CommandLine(self.ledger, self.root)
        changed = line.settle(pools, before)
        if pools or os.path.exists(self._path(TMPFILES_PATH)):
            self.put("memory.hugepages.boot", TMPFILES_PATH, render_tmpfiles(pools))
        for pool in pools_to_give_back(before, pools, numa_nodes(self.root)):
            if read_hugepages(pool, self.root) is not None:
                self._resize(pool, "pages of it are in use: end the job that holds them, or reboot")
        for pool in pools:
            lacking = pool.count - (read_hugepages(pool, self.root) or 0)
            if pool.gigantic and lacking > 0 and not line.in_force(pools):
                self._until_reboot(pool, try_now=changed)
            else:
                self._resize(pool, "reboot while memory is whole (they are set for the next boot), or ask for fewer")
        return pools

    def _resize(self, pool: HugePages, hint: str) -> None:
        name = "memory.hugepages[%s]" % pool.label
        pages = read_hugepages(pool, self.root)
        expected = "%d pages" % pool.count
        if not self.ledger.differs(name, expected, "%s pages" % pages, pool.path, "%s\n" % pages, "%d\n" % pool.count):
            return
        pages = self.write_pool(pool)
        if pages != pool.count:
            self.ledger.give_up(
                name,
                "%s pages" % pages,
                hint,
                "%d huge pages of %s asked for, the kernel has %s. hint: %s"
                % (pool.count, format_size_binary(pool.size_kib * 1024), pages, hint),
            )

    def _until_reboot(self, pool: HugePages, try_now: bool) -> None:
        """Record 1 GiB pages that wait for the next boot. With ``try_now``, ask the running kernel for them first.

        For that the kernel must move pages, which costs running jobs time, and mostly fails on a node that has worked
        for a while. So only the run that sets the command line tries.
        """
        pages = read_hugepages(pool, self.root)
        name = "memory.hugepages[%s]" % pool.label
        if try_now and self.ledger.differs(
            name, "%d pages" % pool.count, "%s pages" % pages, pool.path, "%s\n" % pages, "%d\n" % pool.count
        ):
            pages = self.write_pool(pool)
            if pages != pool.count:
                self.ledger.later(name, "%s pages" % pages, "the next boot brings the rest")
        if pages != pool.count:
            self.reboot_reasons.append(
                "huge pages: %d of %s%s are asked for, the running kernel has %s; the next boot reserves them"
                % (
                    pool.count,
                    format_size_binary(pool.size_kib * 1024),
                    "" if pool.numa_node is None else " on NUMA node %d" % pool.numa_node,
                    pages,
                )
            )

    def write_pool(self, pool: HugePages) -> int | None:
        """Ask the kernel for the pages. Returns the number that it has then, which may be smaller."""
        with open(self._path(pool.path), "w", encoding="ascii") as stream:
            stream.write("%d" % pool.count)
        return read_hugepages(pool, self.root)

    def shm(self) -> dict[str, Any]:
        """An fstab line for later boots, a remount for now. Returns the size and the huge pages, for the manifest."""
        text = self.wanted["shm_size"]
        size = shm_size_bytes(text, self.root) if text else None
        if size is not None:
            if mount_at(POINT, read_mounts(self.root)) is None:
                raise Refusal(
                    "`/dev/shm` is not mounted. hint: `mount -t tmpfs tmpfs /dev/shm`, and look for what unmounted it"
                )
            self._refuse_shm(size)
        # Before fstab has it: what the kernel refuses must not be there at the next boot.
        huge = self._shm_huge_now() if self.wanted["shm_huge"] else None
        # A kernel without huge pages for a tmpfs refuses the whole entry for such an option.
        self._shm_at_boot(size, "" if huge == "never" and not tmpfs_policies(self.root)[0] else huge)
        if size is not None:
            self._shm_size_now(size)
        return {"shm_bytes": size, **({} if huge is None else {"shm_huge": huge})}

    def _shm_huge_now(self) -> str | None:
        """Returns the policy that is in force: ``never`` where the kernel has no huge pages for a tmpfs, None where
        /dev/shm is no tmpfs."""
        asked: str = self.wanted["shm_huge"]
        live = shm_huge(self.root)
        if live is None:
            self.ledger.warnings.append("`/dev/shm` is no tmpfs, so `host_memory_shm_huge` changes nothing")
            return None
        policies, override = tmpfs_policies(self.root)
        policy = asked
        if asked != "never" and asked not in policies:
            self.ledger.warnings.append(
                "`/dev/shm` keeps pages of 4 KiB (`huge=never`): this kernel does not offer `huge=%s` (`/%s`)"
                % (asked, SHMEM_ENABLED)
            )
            policy = "never"
        elif override == "deny" and asked != "never":
            self.ledger.warnings.append("`huge=%s` has no effect while `/%s` is `deny`" % (asked, SHMEM_ENABLED))
        if self.ledger.differs(
            "memory.shm_huge", policy, live, "/dev/shm", "huge pages %s\n" % live, "huge pages %s\n" % policy
        ):
            try:
                run(["mount", "-o", "remount,huge=%s" % policy, POINT])
            except CommandError as error:
                self.ledger.later("memory.shm_huge", live, "the kernel refused it; all else works without")
                self.ledger.warnings.append("`/dev/shm` stays at `huge=%s`: %s" % (live, error))
                return live
        return policy

    def _shm_at_boot(self, size: int | None, huge: str | None) -> None:
        before = content(self._path(FSTAB))
        try:
            after = with_shm(before, size, huge)
        except FstabConflict as error:
            self.ledger.cannot("fstab[/dev/shm]", "one line", str(error), "leave one of them", str(error))
            return
        if self.ledger.file_differs("fstab[/dev/shm]", FSTAB, before, after):
            replace_file(self._path(FSTAB), after)
            if os.path.isdir("/run/systemd/system"):
                run(["systemctl", "daemon-reload"])

    def _shm_size_now(self, size: int) -> None:
        live = shm_bytes(self.root)
        size_now = format_size_binary(live) if live is not None else "no tmpfs"
        if self.ledger.differs(
            "memory.shm", format_size_binary(size), size_now, "/dev/shm", "size %s\n" % live, "size %d\n" % size
        ):
            run(["mount", "-o", "remount,size=%d" % size, POINT])
            if shm_bytes(self.root) != size:
                raise Refusal("`/dev/shm` has %s bytes after its remount, %d asked for" % (shm_bytes(), size))

    def _refuse_shm(self, size: int) -> None:
        pools = sum(parse_size(entry["size"] or "2MiB") * entry["count"] for entry in self.wanted["hugepages"])
        total = memory_total(self.root)
        if size + pools > total:
            beside = " beside huge pages of %s" % format_size_binary(pools) if pools else ""
            raise Refusal(
                "`/dev/shm` of %s%s is more than the node's RAM of %s: the OOM killer ends a program that fills it. "
                "hint: lower `host_memory_shm_size`" % (format_size_binary(size), beside, format_size_binary(total))
            )
        live = shm_bytes(self.root)
        if live is None or size >= live:
            return
        used = shm_used(self.root)
        if size < used:
            text = "%s are in use there" % format_size_binary(used)
            hint = "end the jobs that use it, look at `ls -l /dev/shm`, or ask for more"
            self.ledger.cannot(
                "memory.shm",
                format_size_binary(size),
                "%s, and %s" % (format_size_binary(live), text),
                hint,
                "`/dev/shm` cannot be made %s: %s. hint: %s" % (format_size_binary(size), text, hint),
            )

    def memlock(self) -> str | None:
        """Set limits.d for logins and DefaultLimitMEMLOCK for services. Returns the limit in the form of
        limits.conf(5)."""
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
    share = shm_share(text)
    if share is not None:
        size = memory_total(root) * share // 100
    elif text.endswith("%"):
        raise Refusal("`%s` is not a share of the RAM. hint: 1%% to 99%%" % text)
    else:
        size = parse_size(text)
    if size < PAGE:
        raise Refusal("`/dev/shm` cannot have %d bytes. hint: write `50%%` or `64GiB`" % size)
    return size // PAGE * PAGE
