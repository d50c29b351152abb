"""Removing volumes that are on one drive each: all of them, or the one whose drive is replaced. Only reads."""

from __future__ import annotations

import uuid
from dataclasses import replace

from ..array.drive_decisions import IGNORE, REFUSE, WIPE, Decision
from ..array.drive_volumes import DriveVolume
from ..array.present import as_array
from ..machine.drive_contents import Signature
from ..machine.drives import Drive
from ..machine.file_system import BUILT
from .decision import Machine, Place, Removal, Volume, digest


def plan_drives(machine: Machine, mount_point: str, only: str | None = None) -> Removal:
    """Decide about every drive. ``only``: the serial of the one drive whose volume goes."""
    volumes = sorted(machine.volumes.values(), key=lambda each: (len(each.name), each.name))
    doomed = [volume for volume in volumes if only in (None, volume.serial)]
    rows, members, problems, places = [], [], [], []
    for drive in machine.drives:
        row = _row(drive, machine, only)
        rows.append(row)
        if row.verdict == WIPE:
            members.append(drive)
        elif row.verdict == REFUSE:
            problems.append("drive `%s` (%s) %s" % (drive.serial, drive.name, row.reason))
    present = {drive.serial: drive for drive in machine.drives}
    seen = [drive.serial for drive in machine.drives]
    doubles = [volume.serial for volume in doomed if seen.count(volume.serial) > 1]
    problems += ["serial `%s` is on several drives" % double for double in doubles]
    for volume in doomed:
        point = machine.points.get(volume.name) or "%s/%s" % (mount_point, volume.name)
        there = present.get(volume.serial)
        arrays = (as_array(there, volume.name, volume.uuid),) if there else ()
        places.append(Place(point, volume.uuid, arrays, volume.name))
    return Removal(
        volume=Volume(
            "the drives" if only is None else doomed[0].name if doomed else "",
            digest(["drives", *(volume.uuid for volume in doomed)]),
            None,
            mount_point,
            tuple(volume.serial for volume in volumes),
        ),
        decisions=tuple(rows),
        problems=tuple(problems),
        members=tuple(members),
        absent=tuple(volume.serial for volume in volumes if volume.serial not in present),
        hashes={drive.serial: _hash(drive, machine) for drive in members},
        places=tuple(places),
    )


def _row(drive: Drive, machine: Machine, only: str | None) -> Decision:
    volume = machine.volumes.get(drive.serial)
    if volume is None:
        return Decision(drive, IGNORE, "not a member")
    if only not in (None, drive.serial):
        return Decision(drive, IGNORE, "keeps volume `%s`" % volume.name)
    if drive.name in machine.unreadable:
        return Decision(drive, REFUSE, machine.unreadable[drive.name])
    labels = machine.signatures.get(drive.name, ())
    what = ["holds %s" % signature for signature in labels if not is_its(signature, drive, volume)]
    what += ["has partition %s" % name for name in drive.partitions]
    # The users of the mounted volume are looked at when it is unmounted.
    what += [use for use in drive.uses if not (labels and use.startswith("mounted at "))]
    if what:
        return Decision(drive, REFUSE, "%s, where volume `%s` was built" % ("; ".join(what), volume.name))
    return Decision(drive, WIPE, "volume `%s`" % volume.name) if labels else Decision(drive, IGNORE, "blank already")


def is_its(signature: Signature, drive: Drive, volume: DriveVolume) -> bool:
    """Whether it is the file system of the volume."""
    return (signature.device, signature.type, signature.uuid) == (drive.name, BUILT.type, volume.uuid)


def _hash(drive: Drive, machine: Machine) -> str:
    """What identifies the volume on a drive; no write of a job changes it."""
    labels = [[label.type, label.uuid or "", label.label or ""] for label in machine.signatures.get(drive.name, ())]
    return digest(["drive", drive.serial, drive.size_bytes, drive.lba_bytes, sorted(labels)])


def after_swap(removal: Removal, machine: Machine, old: str, new: str) -> Removal:
    """With the volumes as they will be noted: the new drive has the name of the old one's, and a UUID of its own. The
    old one may come back to the node, and a line in fstab would then mount either."""
    gone = machine.volumes[old]
    noted = [each for each in machine.volumes.values() if each.serial != old]
    return replace(removal, noted=(*noted, replace(gone, serial=new, uuid=str(uuid.uuid4()))))
