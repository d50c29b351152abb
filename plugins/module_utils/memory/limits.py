"""What stands against the memory that is asked for.

``memory_problems``: no machine can give it; judged without reading anything. ``refuse_impossible``: this one cannot.
``rivals``: another file asks for other huge pages at boot.
"""

from __future__ import annotations

import re
from typing import Any, Mapping, Sequence

from ..common.boot_files import location, sysctl_lines
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
from ..units import UnitError, format_size_binary, parse_size
from .kernel_parameters import leading_number

_KIB = 1024


def memory_problems(wanted: Mapping[str, Any]) -> list[str]:
    """Every problem, a line each with its hint. ``wanted``: the arguments of M(tunetool.node.host_memory)."""
    problems = [_pool(entry) for entry in wanted["hugepages"]]
    share = wanted["hugepages_max_share"]
    if not 0 <= share <= 100:
        problems.append("`host_memory_hugepages_max_share` is %d. hint: a share of the RAM from 0 to 100" % share)
    problems += [_shm_size(wanted["shm_size"]), _memlock(wanted["memlock"])]
    return [problem for problem in problems if problem]


def shm_share(text: str) -> int | None:
    """The percentage of a share of the RAM such as ``50%``; None for any other text."""
    match = re.match(r"^([1-9]\d?)%$", text)
    return int(match.group(1)) if match else None


def _pool(entry: Mapping[str, Any]) -> str | None:
    size, count, node = entry.get("size") or "2MiB", entry["count"], entry.get("numa_node")
    shown = "huge pages {size: %s, count: %d}" % (size, count)
    try:
        size_bytes = parse_size(size)
    except UnitError as error:
        return "%s: %s. hint: %s" % (shown, error.message, error.hint)
    if size_bytes < _KIB or size_bytes % _KIB:
        return "%s: pages of %s do not exist. hint: use `2MiB` or `1GiB`" % (shown, format_size_binary(size_bytes))
    if count < 0:
        return "%s: a count below zero. hint: the number of pages, or 0 to free them" % shown
    if node is not None and node < 0:
        return "%s: NUMA node %d does not exist. hint: see `lscpu`" % (shown, node)
    return None


def _shm_size(text: str) -> str | None:
    if not text or shm_share(text) is not None:
        return None
    if text.endswith("%"):
        return "`host_memory_shm_size`: `%s` is not a share of the RAM. hint: 1%% to 99%%" % text
    try:
        size = parse_size(text)
    except UnitError as error:
        return "`host_memory_shm_size`: %s. hint: %s" % (error.message, error.hint)
    if size < 4 * _KIB:
        return "`/dev/shm` cannot have %d bytes. hint: write `50%%` or `64GiB`" % size
    return None


def _memlock(text: str) -> str | None:
    if not text or text == "unlimited":
        return None
    try:
        size = parse_size(text)
    except UnitError as error:
        return "`host_memory_memlock`: %s. hint: `unlimited`, or %s" % (error.message, error.hint)
    if size < _KIB:
        return "`host_memory_memlock` is %d bytes: nothing could be locked. hint: `unlimited`, or `64GiB`" % size
    return None


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
    if leading_number(line.partition("=")[2].strip()) == count:
        return []
    return [
        "huge pages: %s has `%s`, and %d pages are asked for here. A boot ends with ours, and `sysctl --system` with "
        "those: remove that line" % (location(path, number, root), line, count)
    ]
