"""Recorded machines: documents of tunetool.node.recording, laid out as trees that readers can use as root."""

from __future__ import annotations

import json
from pathlib import Path

from tunetool.node.machine import recording

RECORDED = Path(__file__).parent / "data/machines"
ARRAY_CURES = {
    "broken": "tunetool.node.replace_drive",
    "clear": "mdadm --assemble --scan",
    "readonly": "mdadm --readwrite",
    "suspended": "a RAID0 has neither",
}
"""States of an array that takes no writes, and part of the remedy."""


def lay_out(name: str, root: Path) -> Path:
    """The recorded machine ``name`` under ``root``, links as links."""
    recording.lay_out(json.loads((RECORDED / f"{name}.json").read_text()), str(root))
    return root
