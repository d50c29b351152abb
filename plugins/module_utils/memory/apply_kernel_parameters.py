"""1 GiB pages on the kernel's command line: compares first, then changes what differs."""

from __future__ import annotations

import os
from typing import Sequence

from ..common.drift import Ledger
from ..common.files import read_text
from ..common.refusal import Refusal
from ..machine.memory import HugePages
from . import boot_loader
from .kernel_parameters import carries, foreign_pools, knows_nodes, parameters

NAME = "memory.hugepages.cmdline"


class CommandLine:
    """The kernel's command line at the next boot, and that of the running kernel."""

    def __init__(self, ledger: Ledger, root: str = "/") -> None:
        self.ledger = ledger
        self.root = root
        self.running = (read_text(os.path.join(root, "proc/cmdline")) or "").split()

    def in_force(self, pools: Sequence[HugePages]) -> bool:
        """Whether the running kernel was booted with the words for ``pools``."""
        return carries(self.running, parameters(pools))

    def settle(self, pools: Sequence[HugePages], before: Sequence[HugePages]) -> bool:
        """Make the boot loader add the words for ``pools`` and drop those for ``before``; true when that changes it."""
        wanted, old = parameters(pools), parameters(before)
        has_file = os.path.exists(os.path.join(self.root, boot_loader.DROPIN_PATH.lstrip("/")))
        if not (wanted or old or has_file):
            return False
        self._refuse_nodes(pools)
        loader = boot_loader.find(self.root)
        if loader is None:
            self._refuse_unknown(wanted)
            return False
        ours = loader.ours() or old
        entries = loader.entries()
        if wanted:
            _refuse_others(entries, pools, [wanted, ours], loader.where)
        stale = [] if ours == wanted else ours
        right = all(carries(words, wanted) for words in entries) and not (
            stale and any(carries(words, stale) for words in entries)
        )
        if right and loader.keeps(wanted):
            return False
        present = " ".join(ours) if ours and any(carries(words, ours) for words in entries) else "none"
        if self.ledger.differs(
            NAME, " ".join(wanted) or "none", present, loader.where, present + "\n", (" ".join(wanted) or "none") + "\n"
        ):
            loader.put(wanted, ours)
        return True

    def _refuse_nodes(self, pools: Sequence[HugePages]) -> None:
        release = read_text(os.path.join(self.root, "proc/sys/kernel/osrelease")) or ""
        named = any(pool.gigantic and pool.numa_node is not None for pool in pools)
        if named and not knows_nodes(release):
            raise Refusal(
                "Linux %s cannot reserve 1 GiB pages by NUMA node at boot (5.16 and later can). hint: leave "
                "`numa_node` out: the kernel spreads them evenly" % (release or "of unknown version")
            )

    def _refuse_unknown(self, wanted: Sequence[str]) -> None:
        # The owner maintains the command line by other means, and it has the words already.
        if wanted and not carries(self.running, wanted):
            raise Refusal(
                "1 GiB pages need the kernel's command line, and the boot loader here is not known (GRUB on Debian and "
                "Ubuntu, grubby on Red Hat's). hint: put `%s` there yourself, in one piece, reboot, and run this again"
                % " ".join(wanted)
            )


def _refuse_others(
    entries: Sequence[Sequence[str]], pools: Sequence[HugePages], ours: Sequence[Sequence[str]], where: str
) -> None:
    sizes = {pool.size_kib for pool in pools if pool.gigantic}
    for words in entries:
        for pool in foreign_pools(words, ours):
            if pool.size_kib in sizes:
                # The kernel takes the first of two counts for one size and only warns about the second.
                raise Refusal(
                    "`%s` is on the kernel's command line already, and not by tunetool. hint: remove it there (look at "
                    "/etc/default/grub and `%s`), or drop that size from `host_memory_hugepages`"
                    % (" ".join(parameters([pool])), where)
                )
