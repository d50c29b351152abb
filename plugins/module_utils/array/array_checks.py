"""The checks whether the array that was built runs, whole and as it was made."""

from __future__ import annotations

from typing import Any, Mapping

from ..common.check_result import FAIL, Check, judged
from ..common.raid_levels import BUILT_LEVELS, Level
from ..machine.drives import Drive
from ..units import format_size_binary
from .drive_decisions import by_serial
from .md_arrays import Array, cure_of

CHECKS = (ASSEMBLED, STATE, NAME, LEVEL, CHUNK, MEMBERS) = (
    "array.assembled",
    "array.state",
    "array.name",
    "array.level",
    "array.chunk",
    "array.members",
)
REDUNDANCY = "array.redundancy"
_UNKNOWN = "`md/array_state` cannot be read: see `dmesg`"


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
    cure = _UNKNOWN if array.state == "unknown" else cure_of(array.state, array.level)
    checks = [
        judged(ASSEMBLED, True, "%s with UUID %s" % (name, wanted["uuid"]), "`%s`" % array.device, ""),
        judged(
            STATE,
            cure is None,
            "an active array",
            "state `%s`" % array.state,
            cure or "",
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


def check_redundancy(wanted: Mapping[str, Any], array: Array | None, drives: Mapping[str, Drive]) -> list[Check]:
    """Of a level that has any. Without a member `array.members` fails, and its drive is what there is to do.

    A rebuild fails: until its end one more loss takes the data. The first sync of a new array passes: what is written
    to it has its copies at once.
    """
    if (
        not BUILT_LEVELS[wanted["level"]].redundant
        or array is None
        or array.level != wanted["level"]
        or None in array.members
    ):
        return []
    found = (
        "in sync"
        if array.sync is None
        else "in sync but for what nobody wrote (`%s`: %s)"
        % (
            array.sync.action,
            array.sync,
        )
    )
    if array.rebuilding:
        serials = by_serial(array.rebuilding, {name: drive.serial for name, drive in drives.items()})
        found = "degraded, still serves: the rebuild onto %s %s" % (
            serials,
            "is at %s" % array.sync if array.sync else "has not begun",
        )
    return [
        judged(
            REDUNDANCY,
            not array.rebuilding,
            "every copy in sync",
            found,
            "wait for its end: the loss of the drive that it is read from takes the data. Where it does not move, see "
            "`dmesg` and `md/sync_action` of the array",
        )
    ]


def _members_check(wanted: Mapping[str, Any], array: Array, drives: Mapping[str, Drive]) -> Check:
    expected = [member["serial"] for member in wanted["members"]]
    present = [drives[name].serial for name in array.members if name is not None and name in drives]
    gone = [serial for serial in expected if serial not in present]
    strange = [serial for serial in present if serial not in expected]
    text = "%d of %d members" % (len(expected) - len(gone), len(expected))
    # Also where the manifest's are all there: somebody gave the array a further slot, and it lacks a member.
    empty = max(0, array.members.count(None) - len(gone))
    if (gone or empty) and array.degraded:
        text = "degraded, still serves: " + text
    if gone:
        text += "; missing %s" % ", ".join("`%s`" % serial for serial in gone)
    if empty:
        text += "; %d of %d slots of the array empty beside" % (empty, len(array.members))
    if strange:
        text += "; unknown %s" % ", ".join("`%s`" % serial for serial in strange)
    return judged(
        MEMBERS,
        not gone and not strange and not empty,
        "%d members by serial" % len(expected),
        text,
        "reseat that drive and reboot, or replace it and run `ansible-playbook tunetool.node.replace_drive`; "
        + _loss(BUILT_LEVELS[wanted["level"]], array),
    )


def _loss(level: Level, array: Array) -> str:
    """What it means for the data."""
    return level.loss if array.serves or not level.redundant else str(array.fault).partition(": ")[2]
