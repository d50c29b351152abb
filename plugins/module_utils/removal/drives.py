"""Removing the several volumes of a node: all of them, or the one whose drive is replaced. Only reads."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any, Sequence

from ..array.create import drawn_uuid
from ..array.drive_decisions import IGNORE, REFUSE, WIPE, Decision
from ..array.drive_volumes import AnyVolume, ArrayVolume, DriveVolume, in_order
from ..array.md_arrays import Superblock
from ..array.present import as_array
from ..machine.drive_contents import plain_uuid
from ..machine.drives import Drive
from .decision import NOT_A_MEMBER, Machine, Place, Removal, Volume, digest, plan_removal


def plan_several(machine: Machine, mount_point: str, only: str | None = None) -> Removal:
    """Decide about every drive. ``only``: the serial of a drive; the volume that it belongs to goes alone."""
    if any(isinstance(volume, ArrayVolume) for volume in machine.volumes.values()):
        return _plan_arrays(machine, mount_point, only)
    return _plan_drives(machine, mount_point, only)


def _plan_arrays(machine: Machine, mount_point: str, only: str | None) -> Removal:
    """Each array as if it were alone."""
    volumes = [volume for volume in in_order(machine.volumes) if isinstance(volume, ArrayVolume)]
    doomed = [volume for volume in volumes if only is None or only in volume.serials]
    parts, places = [], []
    for volume in doomed:
        # By its UUID, whatever somebody has called it since.
        ours = {
            name: replace(block, name=volume.array)
            for name, block in machine.superblocks.items()
            if _is_of(block, volume)
        }
        alone = replace(machine, manifest=machine.parts.get(volume.name), superblocks=ours, volumes={})
        point = machine.points.get(volume.name) or "%s/%s" % (mount_point, volume.name)
        part = plan_removal(alone, volume.array, point, volume.serials)
        parts.append(part)
        uuid = part.volume.filesystem_uuid if part.volume else None
        serials = tuple(drive.serial for drive in part.members)
        places.append(Place(point, uuid, part.arrays, volume.name, volume.uuid, serials))
    holds = [(part, "%s: %s" % (volume.name, what)) for volume, part in zip(doomed, parts) for what in part.holds]
    insides = sorted({str(part.inside) for part, _ in holds})
    present = {drive.serial for drive in machine.drives}
    return Removal(
        volume=Volume(
            ", ".join(volume.array for volume in doomed),
            digest(["arrays", *(volume.uuid for volume in doomed)]),
            None,
            mount_point,
            tuple(serial for volume in volumes for serial in volume.serials),
        ),
        decisions=tuple(_of_arrays(drive, parts, machine, only) for drive in machine.drives),
        problems=tuple(dict.fromkeys(problem for part in parts for problem in part.problems)),
        members=tuple(drive for drive in machine.drives if any(drive in part.members for part in parts)),
        absent=tuple(serial for volume in volumes for serial in volume.serials if serial not in present),
        arrays=tuple(array for part in parts for array in part.arrays),
        hashes={serial: value for part in parts for serial, value in (part.hashes or {}).items()},
        # After a cut between two arrays a new plan is needed: what is left is no longer what the old one saw.
        inside=digest(["insides", *insides]) if insides else None,
        holds=tuple(what for _, what in holds),
        places=tuple(places),
    )


def _is_of(block: Superblock, volume: ArrayVolume) -> bool:
    return plain_uuid(block.uuid) == plain_uuid(volume.uuid)


def _of_arrays(drive: Drive, parts: Sequence[Removal], machine: Machine, only: str | None) -> Decision:
    """The drive's decision of those about each array: a reason against it, else the one that is about it."""
    rows = [row for part in parts for row in part.decisions if row.drive is drive and row.reason != NOT_A_MEMBER]
    volume = machine.volumes.get(drive.serial)
    if not rows and volume is not None and only is not None:
        return Decision(drive, IGNORE, "keeps volume `%s`" % volume.name)
    ranked = sorted(rows, key=lambda row: (row.verdict != REFUSE, row.verdict != WIPE))
    return ranked[0] if ranked else Decision(drive, IGNORE, NOT_A_MEMBER)


def _plan_drives(machine: Machine, mount_point: str, only: str | None) -> Removal:
    volumes = [volume for volume in in_order(machine.volumes) if isinstance(volume, DriveVolume)]
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
        serials = (volume.serial,) if there in members else ()
        places.append(Place(point, volume.uuid, arrays, volume.name, serials=serials))
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
        return Decision(drive, IGNORE, NOT_A_MEMBER)
    if only not in (None, drive.serial):
        return Decision(drive, IGNORE, "keeps volume `%s`" % volume.name)
    if drive.name in machine.unreadable:
        return Decision(drive, REFUSE, machine.unreadable[drive.name])
    labels = machine.signatures.get(drive.name, ())
    what = ["holds %s" % signature for signature in labels if not volume.carried_by(drive.name, signature)]
    what += ["has partition %s" % name for name in drive.partitions]
    # The users of the mounted volume are looked at when it is unmounted.
    what += [use for use in drive.uses if not (labels and use.startswith("mounted at "))]
    if what:
        return Decision(drive, REFUSE, "%s, where volume `%s` was built" % ("; ".join(what), volume.name))
    return Decision(drive, WIPE, "volume `%s`" % volume.name) if labels else Decision(drive, IGNORE, "blank already")


def _hash(drive: Drive, machine: Machine) -> str:
    """What identifies the volume on a drive; no write of a job changes it."""
    labels = [[label.type, label.uuid or "", label.label or ""] for label in machine.signatures.get(drive.name, ())]
    return digest(["drive", drive.serial, drive.size_bytes, drive.lba_bytes, sorted(labels)])


def broken_beside(machine: Machine, old: str) -> list[AnyVolume]:
    """Volumes without the drive ``old`` that lack one of theirs, with the manifest's part of each; without it where
    nothing has that: such a one could not be known again."""
    present = {drive.serial for drive in machine.drives}
    parts: dict[str, Any] = {each["name"]: each for each in (machine.manifest or {}).get("volumes", ())}
    return [
        replace(volume, as_built=parts.get(volume.name, volume.as_built))
        for volume in in_order(machine.volumes)
        if old not in volume.serials and not present.issuperset(volume.serials)
    ]


def after_swap(removal: Removal, machine: Machine, old: str, new: str) -> Removal:
    """With the volumes as they will be noted: the new drive has the place of the old one in its volume, which gets a
    UUID of its own. The old one may come back to the node, and a line in fstab would then mount either. Those that are
    ``left`` are noted with the manifest's part of them."""
    gone = machine.volumes[old]
    left = {volume.name: volume for volume in removal.left}
    noted = [left.get(each.name, replace(each, as_built=None)) for each in in_order(machine.volumes) if each != gone]
    if isinstance(gone, ArrayVolume):
        serials = tuple(new if serial == old else serial for serial in gone.serials)
        anew: AnyVolume = replace(gone, serials=serials, uuid=drawn_uuid(), as_built=None)
    else:
        anew = replace(gone, serial=new, uuid=str(uuid.uuid4()), as_built=None)
    return replace(removal, noted=(*noted, anew))
