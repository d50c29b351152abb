"""The array of a manifest as it is on the machine now: md's, or the drive itself where a volume has one without md."""

from __future__ import annotations

import os
from typing import Any, Mapping

from ..common.files import read_text
from ..common.raid_levels import SINGLE
from ..machine.drives import Drive, read_drives
from .md_arrays import Array, find, read_arrays


def present(built: Mapping[str, Any], root: str = "/") -> Array | None:
    """What the manifest's part ``array`` names, if it is there: an assembled array, or the drive with its serial."""
    if built["level"] != SINGLE.name:
        return find(read_arrays(root), built["uuid"])
    serial = built["members"][0]["serial"]
    drives = [drive for drive in read_drives(root) if drive.serial == serial]
    return as_array(drives[0], built["name"], built["uuid"], root) if len(drives) == 1 else None


def as_array(drive: Drive, name: str, uuid: str | None, root: str = "/") -> Array:
    """A drive that has a volume of its own, as those who read and write volumes take an array."""
    number = read_text(os.path.join(root, "sys/class/block", drive.name, "dev")) or ""
    return Array(drive.name, uuid, name, SINGLE.name, 0, 1, "active", (drive.name,), number)
