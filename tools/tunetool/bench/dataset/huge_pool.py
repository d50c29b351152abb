"""The kernel's pool of huge pages, filled for a while and emptied again, after SIGKILL too.

Only a pool that is empty is filled: ``vm.nr_hugepages`` spreads pages over the NUMA nodes, so an old number written
there does not put an old pool back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tunetool.measure.busy import device_lock, lock_directory
from tunetool.measure.janitor import Janitor
from tunetool.measure.worker import Failed
from tunetool.node.common.files import read_int
from tunetool.node.machine.memory import HugePages, default_hugepage_kib, meminfo, numa_nodes, read_hugepages
from tunetool.node.units import format_size_binary

_POOL = "proc/sys/vm/nr_hugepages"


def too_large(pages: int, root: str = "/") -> str | None:
    """That a pool of this many pages would take more than half of the memory that is available; None if it does not."""
    size, available = pages * default_hugepage_kib(root) * 1024, meminfo("MemAvailable", root)
    if available is None or size <= available // 2:
        return None
    return (
        f"a pool of {pages} huge pages takes {format_size_binary(size)}, more than half of the "
        f"{format_size_binary(available)} of memory that are available"
    )


def obstacle(pages: int, root: str = "/") -> str | None:
    """Why the pool cannot be filled with this many pages and emptied again; None if it can."""
    if not default_hugepage_kib(root):
        return "the kernel has no pool of huge pages"
    if os.geteuid() != 0 or not os.access(Path(root, _POOL), os.W_OK):
        return f"`vm.nr_hugepages` = {pages} needs root on the node itself"
    if filled := _filled(root):
        return f"the pool of huge pages is in use ({filled}): a run could not put it back as it is in each NUMA node"
    return too_large(pages, root)


def _filled(root: str) -> str:
    """The parts of the pool that have pages, with their numbers, for people; empty if none has any."""
    known = {"`vm.nr_hugepages`": read_int(str(Path(root, _POOL)))}
    for node in numa_nodes(root):
        known[f"NUMA node {node}"] = read_hugepages(HugePages(default_hugepage_kib(root), 0, node), root)
    return ", ".join(f"{name}: {count}" for name, count in known.items() if count)


def pool_lock(environment: Mapping[str, str]) -> AbstractContextManager[None]:
    """The lock of the node's pool. Raises ``CannotJudge`` at once when another run holds it."""
    return device_lock("huge-pages", lock_directory(environment, os.geteuid() == 0))


def resize(setting: Path, pages: int) -> int:
    """Ask the kernel for a pool of this many pages; how many it has then."""
    setting.write_text(f"{pages}\n")
    return int(setting.read_text())


@contextmanager
def huge_pool(pages: int, say: Callable[[str], None], root: str = "/") -> Iterator[None]:
    """``pages`` huge pages in the pool, which is empty before and afterwards. Raises ``Failed`` where the kernel has
    fewer. ``say`` gets a line where the pool is not empty at the end.

    Another process empties it too: once this one is gone, however it ended.
    """
    setting = Path(root, _POOL)
    with Janitor(str(setting)) as janitor:
        janitor.note({"kind": "value", "path": str(setting), "value": "0"})
        try:
            there = resize(setting, pages)
            if there < pages:
                raise Failed(
                    f"the kernel has room for {there} huge pages in its pool, not for {pages}",
                    "take fewer `--huge-pages`",
                )
            yield
        finally:
            resize(setting, 0)
            if filled := _filled(root):
                say(f"the pool of huge pages was empty before and is not now ({filled}): `sysctl vm.nr_hugepages=0`")
