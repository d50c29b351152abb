"""The systemd unit that mounts the scratch volume when it appears after the boot went on without it.

A mount from /etc/fstab is tried once, and what requires it with it: after the device's time-out systemd tries neither
again. The unit hangs on the device of the file system, which appears when md runs the whole array: an array that lacks
members has no such device.
"""

from __future__ import annotations

import glob
import os
import shlex
from typing import Any, Mapping

from ..common.check_result import FAIL, PASS, SKIP, Check
from ..common.files import exact_text
from ..machine.fstab import FSTAB, entries_at
from .mount_options import last_of
from .unit_dropins import (
    UNITS_DIRECTORY,
    Change,
    ForeignDropIn,
    device_unit,
    escape,
    exact_changes,
    link_to,
    quoted,
)

CHECK_ID = "filesystem.boot"
UNIT = "tunetool-late-volume.service"
"""Of the only volume of a node."""
_UNIT_DIRECTORIES = (UNITS_DIRECTORY, "/run/systemd/system")
"""Before those of the generators, which read fstab; the first one that has the unit counts."""
HEADER = "# Written by tunetool (role scratch_filesystem); it goes with the volume."

SCRIPT = (
    "mount=$1;",
    # A volume that was mounted in this boot and is not now was unmounted by somebody, for a reason.
    'since=$(systemctl show --property=ActiveEnterTimestampMonotonic --value -- "$mount");',
    'if [ "$since" != 0 ]; then exit 0; fi;',
    'systemctl start -- "$mount" || exit;',
    # All that requires the mount, directly or through others.
    "all=; next=$mount;",
    'while [ -n "$next" ]; do more=;',
    "for unit in $(systemctl show --property=RequiredBy,BoundBy --value -- $next); do",
    'case " $all " in *" $unit "*) ;; *) all="$all $unit"; more="$more $unit";; esac; done;',
    "next=$more; done;",
    # Of that, what this boot wanted: a service that is switched off stays so.
    "start=;",
    "for unit in $all; do",
    "for by in $(systemctl show --property=WantedBy,RequiredBy --value -- $unit); do",
    'if systemctl is-active --quiet -- $by || [ -n "$(systemctl show --property=Job --value -- $by)" ]; then',
    'start="$start $unit"; break; fi; done; done;',
    'echo "$mount came late and is mounted; starting:${start:- nothing}";',
    'if [ -n "$start" ]; then systemctl start --no-block -- $start; fi',
)
"""The unit's work, a program for sh(1) without single quotes and backslashes; its argument is the mount's unit."""

_TEMPLATE = """\
%(header)s
[Unit]
Description=Mount the scratch volume if it appears after the boot went on without it
After=%(mount)s
ConditionPathExists=/dev/disk/by-uuid/%(uuid)s
ConditionPathIsMountPoint=!%(point)s

[Service]
Type=oneshot
ExecStart=/bin/sh -fc '%(script)s' sh %(argument)s

[Install]
WantedBy=%(device)s
"""


def render(point: str, uuid: str) -> str:
    """The unit's text. Nothing of a boot waits for it; in time, the mount has been made, and its conditions fail."""
    mount = escape(point) + ".mount"
    script = " \\\n    ".join(SCRIPT)
    return _TEMPLATE % {
        "header": HEADER,
        "mount": mount,
        "uuid": uuid,
        # No quotes: a condition takes the whole line.
        "point": point.replace("%", "%%"),
        "script": script.replace("%", "%%").replace("$", "$$"),
        "argument": quoted(mount),
        "device": device_unit(uuid),
    }


def unit_of(volume: str) -> str:
    """The unit's name. ``volume``: its name, where a node has several."""
    return "%s-%s.service" % (UNIT[: -len(".service")], volume) if volume else UNIT


def files(point: str, uuid: str, volume: str = "") -> dict[str, str]:
    """Every file by path, with the link that `systemctl enable` would make."""
    unit = unit_of(volume)
    return {
        os.path.join(UNITS_DIRECTORY, unit): render(point, uuid),
        os.path.join(UNITS_DIRECTORY, device_unit(uuid) + ".wants", unit): link_to("../" + unit),
    }


def changes(wanted: Mapping[str, str], root: str = "/", volume: str = "") -> list[Change]:
    """Differences from exactly these files of a volume. Raises ``ForeignDropIn``."""
    units, unit = os.path.join(root, UNITS_DIRECTORY.lstrip("/")), unit_of(volume)
    present = glob.glob(os.path.join(glob.escape(units), "*.device.wants", unit))
    texts = {os.path.join(root, path.lstrip("/")): text for path, text in wanted.items()}
    return exact_changes(os.path.join(units, unit), HEADER, texts, [os.path.join(units, unit), *present])


def check_boot(filesystem: Mapping[str, Any], root: str = "/", volume: str = "") -> Check:
    """Whether a boot mounts the volume, in time or late. ``filesystem``: the manifest's part; ``volume``: its name,
    where a node has several."""
    point, uuid = filesystem["mount_point"], filesystem["uuid"]
    expected = "`UUID=%s` in %s, and `%s`" % (uuid, FSTAB, unit_of(volume))
    fstab = os.path.join(root, FSTAB.lstrip("/"))
    if root != "/" and not os.path.exists(fstab):
        return Check(CHECK_ID, SKIP, expected, "not recorded")
    late = []
    try:
        for change in changes(files(point, uuid, volume), root, volume):
            late.append("%s: %s" % in_words(change))
    except ForeignDropIn as error:
        late.append(str(error).partition(". hint: ")[0])
    problems = _line_problems(filesystem, exact_text(fstab), not late) + late
    mask = _mask(point, root)
    cures = []
    if mask:
        option = "--runtime " if mask.startswith("/run/") else ""
        cures.append("`systemctl unmask %s%s`" % (option, shlex.quote(os.path.basename(mask))))
    if problems:
        cures.append("`tunetool provision`")
    found = "; ".join((["`%s` masks the mount" % mask] if mask else []) + problems)
    return Check(
        CHECK_ID, FAIL if found else PASS, expected, found or "both", "run " + ", then ".join(cures) if cures else ""
    )


def _line_problems(filesystem: Mapping[str, Any], fstab: str, late: bool) -> list[str]:
    """What keeps the line in fstab from mounting the volume. ``late``: whether the unit for a late volume is whole."""
    point, fs_type = filesystem["mount_point"], filesystem["type"]
    entries = [entry for entry in entries_at(fstab, point) if not entry.skipped]
    if [entry.spec for entry in entries] != ["UUID=" + filesystem["uuid"]]:
        specs = ", ".join("`%s`" % entry.spec for entry in entries)
        return ["%s has %s for `%s`" % (FSTAB, specs or "no line", point)]
    (entry,) = entries
    problems = []
    if not {fs_type, "auto"} & set(entry.fs_type.split(",")):
        problems.append("%s has type `%s` for `%s`, not `%s`" % (FSTAB, entry.fs_type, point, fs_type))
    if last_of(("ro", "rw"), entry.options) == "ro" and "ro" not in filesystem["mount_options"]:
        problems.append("%s has `ro` for `%s`" % (FSTAB, point))
    # The unit for a late volume starts with the device, so at a boot too.
    mounted_by_another = late or {"x-systemd.automount", "comment=systemd.automount"} & set(entry.options)
    if last_of(("noauto", "auto"), entry.options) == "noauto" and not mounted_by_another:
        problems.append("%s has `noauto` for `%s`" % (FSTAB, point))
    return problems


def _mask(point: str, root: str) -> str | None:
    """The path of what masks the mount's unit, if anything does (systemd.unit(5)): nothing mounts it then."""
    for directory in _UNIT_DIRECTORIES:
        path = os.path.join(directory, escape(point) + ".mount")
        there = os.path.join(root, path.lstrip("/"))
        if os.path.islink(there):
            return path if os.path.normpath(os.path.join(directory, os.readlink(there))) == os.devnull else None
        if os.path.exists(there):
            return None if os.path.getsize(there) else path
    return None


def in_words(change: Change) -> tuple[str, str]:
    """What is expected and what is there, for a person."""
    if not change.after:
        return "no unit for another volume", "`%s`" % change.path
    return "`%s`" % change.path, "another text in it" if change.before else "missing"
