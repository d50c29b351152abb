"""Arrays, mounts and swaps on a node's drives: stopped while a saved state is made, restored after. Pure."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from tunetool.errors import CannotJudge

# One line per thing. findmnt lists mounts in the order in which they were made.
LOOK = r"""
for holder in /sys/block/nvme*/holders/* /sys/block/nvme*/nvme*/holders/* /sys/block/md*/holders/*; do
    [ ! -e "$holder" ] || echo "holder ${holder##*/}"
done
for array in /sys/block/md*/md; do
    [ -e "$array" ] || continue
    array=${array%/md}
    missing=$(cat "$array/md/raid_disks")
    for member in "$array"/md/rd[0-9]*/block; do
        # The link of a drive that was pulled leads nowhere.
        [ ! -e "$member" ] || missing=$((missing - 1))
    done
    echo "array ${array##*/} $(cat "$array/md/array_state") $missing" \
        "$(mdadm --detail --export "/dev/${array##*/}" | sed -n 's/^MD_DEVNAME=//p')"
done
while read -r device rest; do
    case "$device" in /dev/nvme*|/dev/md*) echo "swap $device $(blkid -o value -s UUID "$device")" ;; esac
done < /proc/swaps
findmnt -Pn -o SOURCE,UUID,FSTYPE,FSROOT,OPTIONS,TARGET
"""

_ON_DRIVES = re.compile(r"/dev/(nvme|md)")
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})")
_STOPPED = ("clear", "inactive")
_TRIES = 300


@dataclass(frozen=True)
class Mount:
    """A file system on a drive or an array."""

    uuid: str
    kind: str
    options: str
    target: str


@dataclass(frozen=True)
class DriveUse:
    """What is on the drives, in the order in which it was put there."""

    arrays: tuple[str, ...] = ()
    """Kernel names, for stopping the arrays."""
    names: tuple[str, ...] = ()
    """Names under ``/dev/md`` that the arrays must have again."""
    mounts: tuple[Mount, ...] = ()
    swaps: tuple[tuple[str, str], ...] = ()
    """Device and UUID."""


def parse(text: str, node: str) -> DriveUse:
    """Parse the output of ``LOOK``. Raises an error for anything that could not be restored."""
    arrays: list[str] = []
    names: list[str] = []
    mounts: list[Mount] = []
    swaps: list[tuple[str, str]] = []
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "holder" and not rest.startswith("md"):
            raise CannotJudge(
                f"`{node}`: `{rest}` uses its drives", "remove it first: a saved state can hold only md arrays"
            )
        if kind == "array":
            device, state, missing, *name = rest.split()
            arrays.append(device)
            if state in _STOPPED:
                continue
            if state == "broken" or missing != "0":
                raise CannotJudge(
                    f"`{node}`: array `{device}` is broken: it would not start again", "save a whole node"
                )
            names += name
        elif kind == "swap":
            device, uuid = rest.split()
            swaps.append((device, uuid))
        elif line.startswith("SOURCE="):
            mount = _mount(line, node)
            mounts += [mount] if mount else []
    return DriveUse(tuple(arrays), tuple(names), tuple(mounts), tuple(swaps))


def _mount(line: str, node: str) -> Mount | None:
    pairs = (pair.partition("=") for pair in shlex.split(line.replace("\\", "\\\\")))
    fields = {key: _ESCAPE.sub(lambda match: chr(int(match[1], 16)), value) for key, _, value in pairs}
    if not _ON_DRIVES.match(fields["SOURCE"]):
        return None
    if fields["FSROOT"] != "/":
        raise CannotJudge(f"`{node}`: `{fields['TARGET']}` is a bind mount of a drive", f"umount {fields['TARGET']}")
    return Mount(fields["UUID"], fields["FSTYPE"], fields["OPTIONS"], fields["TARGET"])


def take_down(drive_use: DriveUse) -> str:
    """Script that removes everything from the drives: first the mounts, which may be busy, then the arrays."""
    lines = ["sync"]
    lines += [f"swapoff {shlex.quote(device)}" for device, _ in drive_use.swaps]
    lines += [f"umount {shlex.quote(mount.target)}" for mount in reversed(drive_use.mounts)]
    lines += [f"mdadm --stop --quiet /dev/{array}" for array in drive_use.arrays]
    return "\n".join([*lines, "udevadm settle", "sync", ""])


def bring_back(drive_use: DriveUse) -> str:
    """Script that waits until udev has assembled the arrays, as at a boot, and restores the mounts."""
    lines = ["tries=0"]
    for name in drive_use.names:
        mount_path = shlex.quote(f"/dev/md/{name}")
        lines += [
            f"until [ -e {mount_path} ]; do",
            "    tries=$((tries + 1))",
            f'    [ "$tries" -lt {_TRIES} ] || {{ echo "array {name} is not assembled again" >&2; exit 1; }}',
            "    sleep 0.1",
            "done",
        ]
    for mount in drive_use.mounts:
        target, options = shlex.quote(mount.target), shlex.quote(mount.options)
        # udev mounts the ninth drive, perhaps already.
        lines.append(f"mountpoint -q {target} || mount -t {mount.kind} -o {options} UUID={mount.uuid} {target}")
    # A boot may have switched it on already, from fstab.
    lines += [
        f"swapon --show=UUID --noheadings | grep -qxF {uuid} || swapon UUID={uuid}" for _, uuid in drive_use.swaps
    ]
    return "\n".join([*lines, ""])
