# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""The facts that affect the speed of a node, and one hash of them: equal hashes mean comparable figures."""

from __future__ import annotations

import hashlib
import json
import os
import re
from typing import Any, Mapping, Sequence

from ..common.files import read_text
from .block_stack import BlockStack
from .drives import Drive
from .memory import memory_total

_LINK = ("current_speed_gts", "current_width", "max_speed_gts", "max_width")


def hardware(drives: Sequence[Drive], stack: BlockStack | None, root: str = "/") -> dict[str, Any]:
    """The facts, without the host's name and drives' numbers. ``stack``: the measured storage."""
    loaded = read_text(os.path.join(root, "proc/driver/nvidia/version"))
    return {
        "kernel": os.uname().release,
        "cpu": _first(r"^model name\s*:\s*(.+)$", read_text(os.path.join(root, "proc/cpuinfo"))),
        "cpu_count": os.cpu_count(),
        "memory_bytes": memory_total(root) or None,
        # "... Kernel Module  535.104.05 ..." or, the open one, "... Kernel Module for x86_64  550.54.14 ..."
        "driver": _first(r"Kernel Module(?: for \S+)?\s+([0-9.]+)", loaded),
        "drives": sorted(
            json.dumps([drive.model, drive.firmware or None, {name: getattr(drive.link, name) for name in _LINK}])
            for drive in drives
        ),
        "medium": stack.medium if stack else None,
        "mount": sorted(stack.mount.options) if stack and stack.mount else None,
        "file_system": stack.fs_type if stack else None,
    }


def hardware_hash(facts: Mapping[str, Any]) -> str:
    """The record's ``speed_hash``."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()


def hardware_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences, each with both values."""
    return [
        "%s was %s, is %s" % (name, _shown(before.get(name)), _shown(now.get(name)))
        for name in now
        if before.get(name) != now.get(name)
    ]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "%d of other kinds" % len(value) if not value or value[0].startswith("[") else ",".join(value)
    return "unknown" if value is None else str(value)


def _first(pattern: str, text: str | None) -> str | None:
    match = re.search(pattern, text or "", re.MULTILINE)
    return match.group(1).strip() if match else None
