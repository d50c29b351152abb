"""The facts that a removal needs, and the text that its owner reads before applying the plan."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from ..array.drive_volumes import ALL, broken_text, groups_of, known_volumes
from ..array.md_arrays import examine, read_arrays
from ..common.manifest import built_members, load
from ..machine.drive_contents import (
    RAID_MEMBER,
    Signature,
    UnreadableDevice,
    contents_hash,
    read_signatures,
    read_unlabelled,
    use_problems,
    write_problems,
)
from ..machine.drives import disks_under, partitions_of, read_drives
from ..machine.mounts import mount_at, read_mounts
from ..units import format_size
from .decision import Machine, Removal
from .wipe_drives import has_capacity

SHOWN = 5
"""Number of occupants that are named: ending the first usually ends others too."""


def look(incoming: str | None = None) -> tuple[Machine, dict[str, str]]:
    """The facts of the node, and hashes of the contents of the drive ``incoming``. Only reads."""
    manifest: dict[str, Any] | None
    try:
        manifest = load()
    except FileNotFoundError:
        manifest = None
    if manifest is not None and not built_members(manifest):
        # Its volume is the owner's: nothing here built it, and nothing removes it.
        manifest = None
    drives = read_drives()
    signatures: dict[str, list[Signature]] = {}
    unreadable: dict[str, str] = {}
    hashes: dict[str, str] = {}
    for drive in drives:
        try:
            signatures[drive.name] = read_signatures([drive.name, *drive.partitions])
            if drive.serial == incoming and not drive.claims:
                if not (signatures[drive.name] or drive.partitions):
                    signatures[drive.name] = read_unlabelled(drive.name, deep=True)
                hashes[drive.name] = contents_hash(drive)
        except UnreadableDevice as error:
            unreadable[drive.name] = "cannot be read: %s" % error
    unreadable.update(use_problems([drive for drive in drives if not drive.uses and drive.name not in unreadable]))
    # Of members too: one that cannot be written would be found when the others are wiped.
    unreadable.update(write_problems(drives))
    members = [name for name, labels in signatures.items() for signature in labels if signature.type == RAID_MEMBER]
    arrays = read_arrays()
    inside = {}
    for array in arrays:
        if array.serves and has_capacity(array.device):
            with contextlib.suppress(UnreadableDevice):
                inside[array.device] = read_signatures([array.device, *partitions_of("/", array.device)])
    machine = Machine(
        drives=drives,
        signatures=signatures,
        superblocks=examine(list(dict.fromkeys(members))),
        arrays=arrays,
        under={array.device: frozenset(disks_under("/", array.device)) for array in arrays},
        inside=inside,
        manifest=manifest,
        unreadable=unreadable,
        volumes=known_volumes() if manifest is None or groups_of(manifest) != ALL else {},
    )
    return machine, hashes


def describe(removal: Removal, in_the_way: list[str]) -> str:
    """The text of the plan beside the table of drives."""
    if removal.problems:
        return "refused: %s" % "; ".join(removal.problems)
    if removal.done or removal.volume is None:
        return removal.note
    volume = removal.volume
    if removal.places:
        return "\n".join([*_of_several(removal), *_left_alone(removal), *_ends(removal, in_the_way)])
    lines = ["would be lost: array `%s` UUID %s" % (volume.name, volume.uuid)]
    if removal.holds:
        lines += ["  with %s" % what for what in removal.holds]
    elif removal.inside is not None:
        lines.append("  with nothing in it")
    elif removal.members:
        state = ", ".join("`%s` is %s" % (array.device, array.state) for array in removal.arrays)
        lines.append("  what lies in it cannot be read: %s" % (state or "it is not assembled"))
    mount = mount_at(volume.mount_point, read_mounts())
    if mount is not None and any(mount.device_number == array.device_number for array in removal.arrays):
        with contextlib.suppress(OSError):
            numbers = os.statvfs(volume.mount_point)
            used = (numbers.f_blocks - numbers.f_bfree) * numbers.f_frsize
            entries = sorted(os.listdir(volume.mount_point))
            named = ", ".join("`%s`" % entry for entry in entries[:3]) + (" ..." if len(entries) > 3 else "")
            lines.append(
                "  mounted at `%s`, %s used, %d %s%s"
                % (
                    volume.mount_point,
                    format_size(used),
                    len(entries),
                    "entry" if len(entries) == 1 else "entries",
                    ": " + named if entries else "",
                )
            )
    return "\n".join([*lines, *_ends(removal, in_the_way)])


def _of_several(removal: Removal) -> list[str]:
    lines = []
    for place in removal.places:
        on = "drive" if len(place.serials) == 1 else "drives"
        if not place.serials:
            of = "drives, or they are" if place.array_uuid else "drive, or it is"
            lines.append("volume `%s`: nothing is left on its %s gone" % (place.name, of))
            continue
        serials = ", ".join("`%s`" % serial for serial in place.serials)
        lines.append("would be lost: volume `%s` on %s %s" % (place.name, on, serials))
        mount = mount_at(place.mount_point, read_mounts())
        if mount is not None and any(mount.device_number == array.device_number for array in place.arrays):
            with contextlib.suppress(OSError):
                numbers = os.statvfs(place.mount_point)
                used = (numbers.f_blocks - numbers.f_bfree) * numbers.f_frsize
                lines.append("  mounted at `%s`, %s used" % (place.mount_point, format_size(used)))
    return lines


def _left_alone(removal: Removal) -> list[str]:
    present = {row.drive.serial for row in removal.decisions}
    return [broken_text(volume.name, volume.serials, present) for volume in removal.left]


def _ends(removal: Removal, in_the_way: list[str]) -> list[str]:
    lines = []
    if removal.absent:
        lines.append("absent: %s" % ", ".join("`%s`" % serial for serial in removal.absent))
    if removal.incoming is not None:
        lines.append("would be lost: what the incoming drive `%s` holds" % removal.incoming.serial)
    if removal.ways:
        lines.append("would be erased, and could not be restored by anybody:")
        lines += ["  `%s` (%s): %s" % (way.drive.serial, way.drive.name, way) for way in removal.ways]
    if in_the_way:
        lines.append("in use, must end before the plan is applied: %s" % shown(in_the_way))
    lines.append("the plan names the volume, not what is in it: what is written from now on is lost as well")
    return lines


def shown(in_the_way: list[str]) -> str:
    """The first names, and the number of further ones."""
    more = " and %d more" % (len(in_the_way) - SHOWN) if len(in_the_way) > SHOWN else ""
    return ", ".join(in_the_way[:SHOWN]) + more
