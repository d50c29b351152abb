"""One host's part of a plan that removes its volume."""

from __future__ import annotations

from typing import Any

from ..array.drive_decisions import REFUSE, WIPE
from ..plan.plan_file import drive_part
from .decision import Removal


def removal_part(removal: Removal, text: str) -> dict[str, Any]:
    """Make one host's part of a plan that removes a volume."""
    action = "refuse" if removal.problems else "nothing" if removal.done else "remove"
    hashes = removal.hashes or {}
    drives = []
    for row in removal.decisions:
        wiped = row.verdict == WIPE and action == "remove"
        verdict = WIPE if wiped else REFUSE if row.verdict == WIPE else row.verdict
        drives.append(drive_part(row, verdict, (), hashes.get(row.drive.serial) if wiped else None))
    part: dict[str, Any] = {"drives": drives, "array_action": action, "array_reason": text}
    if action == "remove" and removal.volume is not None:
        part["volume"] = {"uuid": removal.volume.uuid, "hash": removal.inside, "holds": list(removal.holds)}
    return part
