"""The checks whether the file system that was built is mounted, and as it was made."""

from __future__ import annotations

import os
from typing import Any, Mapping, Sequence

from ..array.md_arrays import Array
from ..common.check_result import FAIL, PASS, SKIP, UNKNOWN, Check, judged
from ..machine.file_system import BUILT
from ..machine.mounts import Mount, hidden_by, hiding, plain_path, read_mounts
from ..units import format_size_binary
from .immutable_flag import Unsupported, is_immutable
from .mount_options import hurting, without
from .named_volume import CHECK_ID as MOUNTED
from .named_volume import unknown_uuid, uuid_of

OPTIONS, GEOMETRY = "filesystem.options", "filesystem.geometry"


def check_built_volume(
    wanted: Mapping[str, Any], array: Array | None, mount: Mount | None, root: str = "/"
) -> list[Check]:
    """``wanted``: the manifest's part; ``mount``: what lies at its mount point."""
    point = wanted["mount_point"]
    expected = "UUID %s at `%s`" % (wanted["uuid"], point)
    if mount is None:
        over = hidden_by(point, read_mounts(root))
        found = "`%s` is not a mount point%s" % (point, _bare(point, root))
        remedy = "run `mount %s`; if it fails, look at the array first" % point
        if over is not None:
            found, remedy = hiding(over, point)
        return [Check(MOUNTED, FAIL, expected, found, remedy)]
    same = array is not None and mount.device_number == array.device_number
    uuid = uuid_of(mount, root) if same else ""
    found = "%s from `%s`" % (mount.fs_type, mount.source)
    remedy = "unmount what hides `%s`, then run `mount %s`" % (point, point)
    status, another = FAIL, False
    if not same or mount.fs_type != wanted["type"] or (uuid and uuid != wanted["uuid"]):
        another = True
        found += ", another file system"
    elif mount.root != "/":
        found += ", but only its directory `%s`" % mount.root
        remedy = "run `umount %s`" % point + ("" if _lies_beneath(mount, root) else ", then `mount %s`" % point)
    elif not uuid:
        why, remedy = unknown_uuid(mount, root)
        status, found = UNKNOWN, "%s; %s" % (found, why)
    else:
        status, remedy = PASS, ""
    checks = [Check(MOUNTED, status, expected, found, remedy)]
    if another:
        # What it is like says nothing of the volume, and a cure of it would be for another one.
        return checks + [
            Check(name, SKIP, "as built", "another file system lies there") for name in (OPTIONS, GEOMETRY)
        ]
    checks.append(_options_check(wanted["mount_options"], mount, point))
    # The kernel names no stripe where there is none, as over a mirror.
    geometry = BUILT.mounted_stripe(mount.options) or (0, 0)
    stripe = (wanted["data_su_bytes"], wanted["data_su_bytes"] * wanted["data_sw"])
    checks.append(
        judged(
            GEOMETRY,
            geometry == stripe,
            "stripe unit %s, width %s" % tuple(format_size_binary(value) for value in stripe),
            "stripe unit %s, width %s" % tuple(format_size_binary(value) for value in geometry)
            if any(geometry)
            else "no stripe geometry",
            "the file system does not fit the array: its data must move, then rebuild the scratch",
        )
    )
    return checks


def _options_check(wanted: Sequence[str], mount: Mount, point: str) -> Check:
    missing = [option for option in wanted if option not in mount.options]
    added = hurting(wanted, mount.options)
    remedy = "unmount and mount `%s`" % point
    if missing:
        remedy = "run `tunetool provision`, or " + remedy
    elif without(added, point):
        remedy = "run `%s`" % without(added, point)
    wrong = [
        "%s %s" % (word, ", ".join("`%s`" % option for option in options))
        for word, options in (("missing", missing), ("added", added))
        if options
    ]
    found = "; ".join(wrong) or "all set"
    return judged(OPTIONS, not wrong, ",".join(wanted), found, remedy)


def _lies_beneath(mount: Mount, root: str) -> bool:
    """Whether the whole file system, of which ``mount`` shows a directory, is mounted at the same place beneath it."""
    return any(
        (each.device_number, each.root, plain_path(each.mount_point))
        == (mount.device_number, "/", plain_path(mount.mount_point))
        for each in read_mounts(root)
    )


def _bare(point: str, root: str) -> str:
    """Text: where a write to the bare mount point would go, if that is known."""
    try:
        if is_immutable(os.path.join(root, point.lstrip("/"))):
            return "; it is immutable, so nothing is written to the root file system in its place"
    except (OSError, Unsupported):
        pass
    return ": what is written there lands on the root file system"
