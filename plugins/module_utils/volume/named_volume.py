"""A volume that the node's owner has: the manifest's part for it, and whether it is still mounted. Nothing is built."""

from __future__ import annotations

import os
from typing import Any, Mapping

from ..common.check_result import FAIL, PASS, UNKNOWN, Check
from ..common.files import read_text
from ..common.refusal import Refusal
from ..machine.mounts import Mount, hidden_by, hiding, mount_at, plain_path, read_mounts
from .volume_answers import LOCAL

CHECK_ID = "filesystem.mounted"
_LINKS = "dev/disk/by-uuid"
_NOTED = "E:ID_FS_UUID="
"""A property in udev's database."""
_GONE = "//deleted"
"""What the kernel adds to the root of a mount whose directory was removed; no path has two slashes.

On a network's file system it may only mean that a name is to be looked up again.
"""


def describe_volume(point: str, root: str = "/") -> dict[str, Any]:
    """The manifest's part `filesystem` for what is mounted at ``point``. Raises ``Refusal`` where nothing is."""
    mount = mount_at(point, read_mounts(root)) if point.startswith("/") else None
    if mount is None:
        raise Refusal(
            "`tunetool_volume`: nothing is mounted at `%s`. hint: name a mount point; `mount --bind` makes one of a "
            "directory" % point
        )
    return {
        "uuid": uuid_of(mount, root),
        "type": mount.fs_type,
        "mount_point": plain_path(point),
        "data_su_bytes": 0,
        "data_sw": 0,
        "log_su_bytes": 0,
        "mount_options": [],
        "root": mount.root,
    }


def uuid_of(mount: Mount, root: str = "/") -> str:
    """The file system's UUID by udev's links, or by what it notes of the device, whose link another one may have taken.

    Empty where there is none, as for a network's. The device is not read: a dead one would hold whoever does.
    """
    directory = os.path.join(root, _LINKS)
    for uuid in sorted(os.listdir(directory)) if os.path.isdir(directory) else []:
        name = os.path.basename(os.readlink(os.path.join(directory, uuid)))
        number = read_text(os.path.join(root, "sys/class/block", name, "dev")) or ""
        if number.strip() == mount.device_number:
            return uuid
    noted = read_text(os.path.join(root, "run/udev/data", "b" + mount.device_number)) or ""
    return next((line[len(_NOTED) :] for line in noted.splitlines() if line.startswith(_NOTED)), "")


def unknown_uuid(mount: Mount, root: str = "/") -> tuple[str, str]:
    """Why ``uuid_of`` knows none of a device that has one, and the cure."""
    if not os.path.isdir(os.path.join(root, _LINKS)):
        return (
            "its UUID is not known, since there is no /%s here" % _LINKS,
            "run this where udev keeps /dev, such as outside the container",
        )
    return "udev keeps no link of its UUID to it", "run `udevadm trigger --settle %s`" % mount.source


def check_volume(wanted: Mapping[str, Any], mount: Mount | None, root: str = "/") -> Check:
    """Whether the file system that the manifest describes is mounted."""
    point = wanted["mount_point"]
    expected = "%s%s at `%s`, the owner's" % (
        wanted["type"],
        " UUID " + wanted["uuid"] if wanted["uuid"] else "",
        point,
    )
    if mount is None:
        over = hidden_by(point, read_mounts(root))
        if over is not None:
            return Check(CHECK_ID, FAIL, expected, *hiding(over, point))
        return Check(CHECK_ID, FAIL, expected, "`%s` is not a mount point" % point, "mount it, its owner knows how")
    uuid = uuid_of(mount, root) if wanted["uuid"] else ""
    found = "%s from `%s`" % (mount.fs_type, mount.source)
    # An earlier version did not note it.
    root_of = wanted.get("root", mount.root)
    if mount.root.endswith(_GONE) and mount.fs_type in LOCAL:
        found = "its directory `%s` was removed: nobody can write there" % mount.root[: -len(_GONE)]
        return Check(CHECK_ID, FAIL, expected, found, "run `umount %s`, and mount a directory that is there" % point)
    if (mount.fs_type, uuid, mount.root) == (wanted["type"], wanted["uuid"], root_of):
        return Check(CHECK_ID, PASS, expected, found)
    same_but_uuid = (mount.fs_type, mount.root) == (wanted["type"], root_of)
    if same_but_uuid and not uuid and not os.path.isdir(os.path.join(root, _LINKS)):
        why, remedy = unknown_uuid(mount, root)
        return Check(CHECK_ID, UNKNOWN, expected, "%s; %s" % (found, why), remedy)
    if uuid != wanted["uuid"]:
        found += ", another file system"
    elif mount.root != root_of:
        found += ", its directory `%s`, not `%s`" % (mount.root, root_of)
    remedy = "unmount what hides `%s` (`umount %s`); if the volume was replaced, run `tunetool provision` again"
    return Check(CHECK_ID, FAIL, expected, found, remedy % (point, point))
