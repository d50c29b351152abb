"""The checks whether the array that was built runs, whole and as it was made."""

from __future__ import annotations

from typing import Any, Mapping

from ..common.check_result import FAIL, Check, judged
from ..common.raid_levels import BUILT_LEVELS
from ..machine.drives import Drive
from ..units import format_size_binary
from .md_arrays import DEAD_STATES, HALTED_STATES, Array

CHECKS = (ASSEMBLED, STATE, NAME, LEVEL, CHUNK, MEMBERS) = (
    "array.assembled",
    "array.state",
    "array.name",
    "array.level",
    "array.chunk",
    "array.members",
)
_STATE_REMEDIES = {**DEAD_STATES, **HALTED_STATES, "unknown": "`md/array_state` cannot be read: see `dmesg`"}


def check_array(wanted: Mapping[str, Any], array: Array | None, drives: Mapping[str, Drive]) -> list[Check]:
    """``wanted``: the manifest's part; ``array``: the one that runs by its UUID; ``drives``: by kernel name."""
    name = "array `%s`" % wanted["name"]
    if array is None:
        present = {drive.serial for drive in drives.values()}
        gone = [member["serial"] for member in wanted["members"] if member["serial"] not in present]
        # In what was found: a scheduler's reason and the metrics have no room for the remedy.
        missing = ", ".join("`%s`" % serial for serial in gone)
        found = "not assembled; missing %s" % missing if gone else "not assembled"
        remedy = "reseat or replace the missing drives" if gone else "run `tunetool provision`, which assembles it"
        return [Check(ASSEMBLED, FAIL, "%s with UUID %s" % (name, wanted["uuid"]), found, remedy)]
    checks = [
        judged(ASSEMBLED, True, "%s with UUID %s" % (name, wanted["uuid"]), "`%s`" % array.device, ""),
        judged(
            STATE,
            array.state not in _STATE_REMEDIES,
            "an active array",
            "state `%s`" % array.state,
            _STATE_REMEDIES.get(array.state, ""),
        ),
        judged(
            NAME,
            array.name == wanted["name"],
            wanted["name"],
            str(array.name),
            "rebuild the initramfs after mdadm.conf: run `tunetool provision`, then reboot",
        ),
        judged(LEVEL, array.level == wanted["level"], wanted["level"], array.level, "run `tunetool provision`"),
        judged(
            CHUNK,
            array.chunk_bytes == wanted["chunk_bytes"],
            format_size_binary(wanted["chunk_bytes"]),
            format_size_binary(array.chunk_bytes),
            "the array was made again with another chunk: run `tunetool provision`",
        ),
    ]
    return checks + [_members_check(wanted, array, drives)]


def _members_check(wanted: Mapping[str, Any], array: Array, drives: Mapping[str, Drive]) -> Check:
    expected = [member["serial"] for member in wanted["members"]]
    present = [drives[name].serial for name in array.members if name is not None and name in drives]
    gone = [serial for serial in expected if serial not in present]
    strange = [serial for serial in present if serial not in expected]
    text = "%d of %d members" % (len(expected) - len(gone), len(expected))
    if gone:
        text += "; missing %s" % ", ".join("`%s`" % serial for serial in gone)
    if strange:
        text += "; unknown %s" % ", ".join("`%s`" % serial for serial in strange)
    return judged(
        MEMBERS,
        not gone and not strange,
        "%d members by serial" % len(expected),
        text,
        "reseat that drive and reboot, or replace it and run `ansible-playbook tunetool.node.replace_drive`; "
        + BUILT_LEVELS[wanted["level"]].loss,
    )
