"""What no machine can give as memory: judges the values that are asked for, without reading anything."""

from __future__ import annotations

import re
from typing import Any, Mapping

from ..units import UnitError, format_size_binary, parse_size

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
