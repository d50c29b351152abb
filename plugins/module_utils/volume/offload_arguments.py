"""The options of a file system and its offload directory, which several modules take."""

from __future__ import annotations

from typing import Any

OFFLOAD_ARGUMENTS: dict[str, Any] = {
    "label": {"type": "str", "default": "nvme_raid0"},
    "offload_owner": {"type": "str", "default": "root"},
    "offload_group": {"type": "str", "default": "root"},
    "offload_mode": {"type": "str", "default": "1777"},
    "services": {"type": "list", "elements": "str", "default": []},
}
"""Documented by the fragment `tunetool.node.offload`."""
