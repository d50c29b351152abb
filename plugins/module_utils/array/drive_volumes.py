"""Volumes on one drive each, without md: which there are, by serial and UUID, and how each is called.

They are noted before the first of them is made, and until they are removed: the UUID of a file system is drawn here,
and by it a drive that a cut-off run left, or whose manifest is damaged, is told from one with somebody else's.
"""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import asdict, dataclass
from typing import Any, Mapping, Sequence

from ..common.drift import known_manifest
from ..common.files import content, replace_file
from ..common.manifest import MANIFEST_PATH, each_volume
from ..common.raid_levels import SINGLE
from ..machine.drive_contents import Signature
from ..machine.drives import Drive
from ..machine.file_system import BUILT

GROUPS = (ALL, DRIVE) = ("all", "drive")
"""What of a node's drives is one volume: all of them, or each."""
NOTES_PATH = "/etc/tunetool/drives.json"


@dataclass(frozen=True)
class DriveVolume:
    """A volume that is on one drive, or will be."""

    name: str
    serial: str
    uuid: str
    """Of its file system."""

    def part(self, drive: Drive, new: bool) -> dict[str, Any]:
        """For the modules after this one; ``array`` as the manifest holds it."""
        array = {"uuid": self.uuid, "name": self.name, "level": SINGLE.name, "chunk_bytes": 0}
        return {"name": self.name, "new": new, "array": {**array, "members": [drive.member]}}


def groups_of(manifest: Mapping[str, Any]) -> str:
    """What of the drives is one volume on a node with this manifest."""
    return DRIVE if "volumes" in manifest else ALL


def known_volumes(root: str = "/") -> dict[str, DriveVolume]:
    """The volumes on drives by serial: those of the manifest, else those that were noted."""
    manifest = known_manifest(root.rstrip("/") + MANIFEST_PATH)
    if manifest is not None:
        volumes = [(name, each["array"]) for name, each in each_volume(manifest)]
        return {
            array["members"][0]["serial"]: DriveVolume(name, array["members"][0]["serial"], array["uuid"])
            for name, array in volumes
            if array is not None and array["level"] == SINGLE.name
        }
    try:
        rows = json.loads(content(_path(root)) or "[]")
        return {row["serial"]: DriveVolume(str(row["name"]), str(row["serial"]), str(row["uuid"])) for row in rows}
    except (ValueError, TypeError, KeyError):
        return {}  # their drives count as somebody else's


def named(serials: Sequence[str], known: Mapping[str, DriveVolume]) -> list[DriveVolume]:
    """A volume for each drive, in the order of their names. Drives that are not known get the names that are free,
    lowest first, in the order of ``serials``."""
    volumes = {serial: known[serial] for serial in serials if serial in known}
    taken = {volume.name for volume in volumes.values()}
    free = (name for name in map("drive%d".__mod__, range(2 * len(serials))) if name not in taken)
    for serial in serials:
        if serial not in volumes:
            volumes[serial] = DriveVolume(next(free), serial, str(uuid.uuid4()))
    return sorted(volumes.values(), key=lambda volume: (len(volume.name), volume.name))


def kept_volumes(
    volumes: Sequence[DriveVolume], serials: Mapping[str, str], signatures: Sequence[Signature]
) -> set[str]:
    """Serials of the drives that carry the file system of their volume, and nothing else. ``serials``: of the drives
    by kernel name; ``signatures``: what lies on them."""
    held: dict[str, list[tuple[str, str | None]]] = {}
    for signature in signatures:
        held.setdefault(serials.get(signature.device, ""), []).append((signature.type, signature.uuid))
    return {each.serial for each in volumes if held.get(each.serial) == [(BUILT.type, each.uuid)]}


def note(volumes: Sequence[DriveVolume], root: str = "/") -> None:
    """Write which volumes there are, or remove that where there are none. Raises ``OSError``."""
    if volumes:
        replace_file(_path(root), json.dumps([asdict(volume) for volume in volumes], indent=2) + "\n")
    elif os.path.exists(_path(root)):
        os.unlink(_path(root))


def _path(root: str) -> str:
    return os.path.join(root, NOTES_PATH.lstrip("/"))
