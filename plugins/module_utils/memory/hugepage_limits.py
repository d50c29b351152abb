"""Limits of huge pages on a machine, and who else asks for some at boot (sysctl.d)."""

from __future__ import annotations

from typing import Sequence

from ..common.boot_files import location, sysctl_lines
from ..common.kernel_numbers import whole
from ..common.refusal import Refusal
from ..machine.memory import (
    HugePages,
    bytes_on_node,
    default_hugepage_kib,
    hugepage_sizes,
    memory_total,
    node_memory,
    numa_nodes,
    read_hugepages,
)
from ..units import format_size_binary


def refuse_impossible(pools: Sequence[HugePages], share: int, root: str = "/") -> None:
    """Raises ``Refusal`` for an unknown size or node, and for more than ``share`` percent of the RAM."""
    offered = hugepage_sizes(root)
    for pool in pools:
        if pool.size_kib not in offered:
            sizes = ", ".join(format_size_binary(size * 1024) for size in offered) or "none"
            raise Refusal(
                "huge pages of %s are not offered by this kernel (%s). hint: 1 GiB pages need a processor with "
                "`pdpe1gb` in /proc/cpuinfo; in a virtual machine, its host must pass that flag on"
                % (format_size_binary(pool.size_kib * 1024), sizes)
            )
        if read_hugepages(pool, root) is None:
            raise Refusal("NUMA node %s does not exist here. hint: see `lscpu`" % pool.numa_node)
        if pool.numa_node is not None and any(p.numa_node is None and p.size_kib == pool.size_kib for p in pools):
            raise Refusal(
                "huge pages of %s are asked for on NUMA node %d and over all nodes. hint: name a node for each, or none"
                % (format_size_binary(pool.size_kib * 1024), pool.numa_node)
            )
    _refuse_share(sum(pool.bytes for pool in pools), memory_total(root), share, "RAM")
    # More than the share on one node starves that node's GPUs and drives, even if other nodes have RAM.
    nodes = {node: node_memory(node, root) for node in numa_nodes(root)}
    nodes = {node: total for node, total in nodes.items() if total}
    if len(nodes) > 1:
        for node, total in nodes.items():
            _refuse_share(bytes_on_node(pools, node, len(nodes)), total, share, "RAM of NUMA node %d" % node)


def _refuse_share(asked: int, total: int, share: int, of_what: str) -> None:
    if asked * 100 > total * share:
        raise Refusal(
            "huge pages would take %s of %s %s, more than %d %%. hint: ask for fewer, or raise "
            "`host_memory_hugepages_max_share`" % (format_size_binary(asked), format_size_binary(total), of_what, share)
        )


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
