"""One host's part of a plan that removes its volume."""

from __future__ import annotations

from typing import Any

from ..array.drive_decisions import REFUSE, WIPE
from ..plan.plan_file import drive_part
from .decision import Removal


def removal_part(found: Removal, text: str) -> dict[str, Any]:
    """One host's part of a plan that removes a volume."""
    action = "refuse" if found.problems else "nothing" if found.done else "remove"
    hashes = found.hashes or {}
    drives = []
    for row in found.decisions:
        wiped = row.verdict == WIPE and action == "remove"
        verdict = WIPE if wiped else REFUSE if row.verdict == WIPE else row.verdict
        drives.append(drive_part(row, verdict, (), hashes.get(row.drive.serial) if wiped else None))
    part: dict[str, Any] = {"drives": drives, "array_action": action, "array_reason": text}
    if action == "remove" and found.volume is not None:
        part["volume"] = {"uuid": found.volume.uuid, "hash": found.inside, "holds": list(found.holds)}
    return part
