"""A node's several volumes, each on one drive or on an array of some: which there are, by serial and UUID, and names.

They are noted before the first of them is made, and until they are removed: the UUID of a file system on a drive, or
of an array, is drawn here, and by it a drive that a cut-off run left, or whose manifest is damaged, is told from one
with somebody else's.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Collection, Mapping, Sequence, Union

from ..common.drift import known_manifest
from ..common.files import content, replace_file
from ..common.manifest import MANIFEST_PATH, SCHEMA, VOLUME_NAME, each_volume, validate
from ..common.raid_levels import SINGLE
from ..common.refusal import Refusal
from ..machine.drive_contents import RAID_MEMBER, Signature, plain_uuid
from ..machine.drives import Drive
from ..machine.file_system import BUILT

GROUPS = (ALL, DRIVE, NUMA) = ("all", "drive", "numa")
"""What of a node's drives is one volume: all of them, each, or those of each NUMA node."""
NOTES_PATH = "/etc/tunetool/drives.json"


@dataclass(frozen=True)
class DriveVolume:
    """A volume that is on one drive, or will be."""

    name: str
    serial: str
    uuid: str
    """Of its file system."""
    as_built: Mapping[str, Any] | None = field(default=None, compare=False)
    """The manifest's part of it, while it is broken and another one is made anew: it is left alone."""
    level: ClassVar[str] = SINGLE.name

    @property
    def serials(self) -> tuple[str, ...]:
        """Of its drives: the one."""
        return (self.serial,)

    def carried_by(self, drive: str, signature: Signature) -> bool:
        """Whether what lies on the drive of this kernel name is the volume's."""
        return (signature.device, signature.type, signature.uuid) == (drive, BUILT.type, self.uuid)

    def part(self, members: Sequence[Drive], new: bool, made: bool = True) -> dict[str, Any]:
        """For the modules after this one; ``array`` as the manifest holds it. The UUID is kept when it is ``made``."""
        array = {"uuid": self.uuid, "name": self.name, "level": self.level, "chunk_bytes": 0}
        return {"name": self.name, "new": new, "array": {**array, "members": [drive.member for drive in members]}}


@dataclass(frozen=True)
class ArrayVolume:
    """A volume that is on an array of some of the drives, or will be."""

    name: str
    serials: tuple[str, ...]
    """By slot."""
    uuid: str
    """Of the array, as mdadm writes it."""
    array: str
    """The array's name."""
    level: str
    chunk_bytes: int
    as_built: Mapping[str, Any] | None = field(default=None, compare=False)
    """As that of a ``DriveVolume``."""

    def carried_by(self, drive: str, signature: Signature) -> bool:
        """Whether what lies on the drive of this kernel name is the label of the volume's array."""
        ours = (signature.device, signature.type) == (drive, RAID_MEMBER)
        return ours and plain_uuid(signature.uuid) == plain_uuid(self.uuid)

    def part(self, members: Sequence[Drive], new: bool, made: bool = True) -> dict[str, Any]:
        """As that of a ``DriveVolume``; an array that is not ``made`` yet has no UUID."""
        array = {
            "uuid": self.uuid if made else None,
            "name": self.array,
            "level": self.level,
            "chunk_bytes": self.chunk_bytes,
        }
        return {"name": self.name, "new": new, "array": {**array, "members": [drive.member for drive in members]}}


AnyVolume = Union[DriveVolume, ArrayVolume]


def groups_of(manifest: Mapping[str, Any]) -> str:
    """What of the drives is one volume on a node with this manifest."""
    if "volumes" not in manifest:
        return ALL
    return DRIVE if manifest["volumes"][0]["array"]["level"] == SINGLE.name else NUMA


def known_volumes(root: str = "/", groups: str = "") -> dict[str, AnyVolume]:
    """The several volumes by the serials of their drives: those of the manifest, else those that were noted.
    ``groups``: only volumes that are made of drives in this way. Raises ``Refusal`` where the note has a name that is
    none."""
    kind = {DRIVE: DriveVolume, NUMA: ArrayVolume}.get(groups, object)
    return by_serial_of([volume for volume in _known(root) if isinstance(volume, kind)])


def volumes_of(manifest: Mapping[str, Any]) -> list[AnyVolume]:
    """The several volumes of a manifest; none where it has the only one."""
    return [_of_manifest(name, each["array"]) for name, each in each_volume(manifest) if name]


def _known(root: str) -> list[AnyVolume]:
    manifest = known_manifest(root.rstrip("/") + MANIFEST_PATH)
    if manifest is not None:
        return volumes_of(manifest)
    try:
        volumes = [_of_note(row) for row in json.loads(content(_path(root)) or "[]")]
    except (ValueError, TypeError, KeyError):
        return []  # their drives count as somebody else's
    for volume in volumes:
        if not re.fullmatch(VOLUME_NAME, volume.name):
            raise Refusal(
                "`%s` names a volume `%s`, which does not match `%s`. hint: write the name that it was made with, or "
                "remove the file: the drives in it then count as somebody else's"
                % (_path(root), volume.name, VOLUME_NAME)
            )
    return volumes


def by_serial_of(volumes: Sequence[AnyVolume]) -> dict[str, AnyVolume]:
    """The volumes by the serial of each of their drives."""
    return {serial: volume for volume in volumes for serial in volume.serials}


def in_order(volumes: Mapping[str, AnyVolume]) -> list[AnyVolume]:
    """Each of the volumes once, by name."""
    return sorted(dict.fromkeys(volumes.values()), key=lambda volume: (len(volume.name), volume.name))


def left_alone(volumes: Mapping[str, AnyVolume]) -> list[AnyVolume]:
    """Those of the volumes that are broken, and that a run leaves alone which makes another one anew."""
    return [volume for volume in in_order(volumes) if volume.as_built is not None]


def standing(volumes: Mapping[str, AnyVolume]) -> dict[str, AnyVolume]:
    """The others, by the serials of their drives."""
    return {serial: volume for serial, volume in volumes.items() if volume.as_built is None}


def part_left_alone(volume: AnyVolume) -> dict[str, Any]:
    """For the modules after this one, which pass it on into the manifest as it was: ``left`` tells it from others."""
    return {**(volume.as_built or {}), "name": volume.name, "new": False, "left": True}


def broken_text(name: str, serials: Sequence[str], present: Collection[str]) -> str:
    """What to say of a volume that is left alone. ``serials``: of its drives; ``present``: of those on the node."""
    gone = [serial for serial in serials if serial not in present]
    cure = (
        "replace it next: `ansible-playbook tunetool.node.replace_drive -e replace_drive_old_serial=%s -e "
        "replace_drive_new_serial=NEW`" % gone[0]
        if len(gone) == 1
        else "put them back, or tear down and build again"
        if gone
        else "run `tunetool provision`"
    )
    missing = " without %s" % ", ".join("`%s`" % serial for serial in gone) if gone else ""
    return "volume `%s` is broken%s, and was left alone. hint: %s" % (name, missing, cure)


def _of_manifest(name: str, array: Mapping[str, Any]) -> AnyVolume:
    serials = tuple(member["serial"] for member in array["members"])
    if array["level"] == SINGLE.name:
        return DriveVolume(name, serials[0], array["uuid"])
    return ArrayVolume(name, serials, array["uuid"], array["name"], array["level"], array["chunk_bytes"])


def _of_note(row: Mapping[str, Any]) -> AnyVolume:
    name, drawn = str(row["name"]), str(row["uuid"])
    volume: AnyVolume
    if "serials" not in row:
        volume = DriveVolume(name, str(row["serial"]), drawn)
    else:
        serials = tuple(str(serial) for serial in row["serials"])
        volume = ArrayVolume(name, serials, drawn, str(row["array"]), str(row["level"]), int(row["chunk_bytes"]))
    as_built = row.get("as_built")
    if as_built is None:
        return volume
    # Nobody looks at what is left alone: whatever is here would stand in the next manifest.
    if validate(as_built, SCHEMA["properties"]["volumes"]["items"]) or volume != _of_manifest(
        as_built["name"], as_built["array"]
    ):
        raise ValueError("as_built")
    return replace(volume, as_built=as_built)


def named(serials: Sequence[str], known: Mapping[str, AnyVolume]) -> list[AnyVolume]:
    """A volume for each drive, in the order of their names. Drives that are not known get the names that are free,
    lowest first, in the order of ``serials``."""
    volumes = {serial: known[serial] for serial in serials if serial in known}
    taken = {volume.name for volume in volumes.values()}
    free = (name for name in map("drive%d".__mod__, range(2 * len(serials))) if name not in taken)
    for serial in serials:
        if serial not in volumes:
            volumes[serial] = DriveVolume(next(free), serial, str(uuid.uuid4()))
    return in_order(volumes)


def kept_volumes(volumes: Sequence[AnyVolume], serials: Mapping[str, str], signatures: Sequence[Signature]) -> set[str]:
    """Serials of the drives that carry what is their volume's, and nothing else. ``serials``: of the drives by kernel
    name; ``signatures``: what lies on them."""
    of, kept = by_serial_of(volumes), set()
    for name, serial in serials.items():
        there = [signature for signature in signatures if signature.device == name]
        if serial in of and len(there) == 1 and of[serial].carried_by(name, there[0]):
            kept.add(serial)
    return kept


def note(volumes: Sequence[AnyVolume], root: str = "/") -> None:
    """Write which volumes there are, or remove that where there are none. Raises ``OSError``."""
    if volumes:
        rows = [{key: value for key, value in asdict(volume).items() if value is not None} for volume in volumes]
        replace_file(_path(root), json.dumps(rows, indent=2) + "\n")
    elif os.path.exists(_path(root)):
        os.unlink(_path(root))


def _path(root: str) -> str:
    return os.path.join(root, NOTES_PATH.lstrip("/"))
