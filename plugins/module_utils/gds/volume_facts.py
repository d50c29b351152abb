"""The volume under a mount point as GPUDirect Storage sees it: file system, md, device mapper, drives, udev's entry."""

from __future__ import annotations

import os
import re
from typing import Any, Optional

from ..common.files import lines, read_text
from ..common.raid_levels import LEVELS
from ..machine.block_stack import device_directory, devices_under, read_stack
from ..machine.file_system import BUILT

MD_RULE = "63-md-raid-arrays.rules"
UDEV_PLACES = (
    "etc/udev/rules.d",
    "run/udev/rules.d",
    "usr/local/lib/udev/rules.d",
    "usr/lib/udev/rules.d",
    "lib/udev/rules.d",
)
"""Directories of udev rules in the order of their precedence (udev(7))."""

PEER_PAGES_SINCE = (6, 2)
"""Kernel from which a direct request may carry peer pages (GDS troubleshooting guide, 14.1)."""
PEER_PAGES_STACKED_SINCE = (7, 2)
"""Kernel from which md and NVMe multipath pass that on (commits 02666132403a and fb0eeeed91f3, block tree for 7.2)."""


def kernel_version(release: str) -> tuple[int, int]:
    """Major and minor of a kernel's release; (0, 0) if unknown."""
    match = re.match(r"([0-9]{1,9})\.([0-9]{1,9})", release)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def read_md_rule(root: str = "/") -> dict[str, Any]:
    for directory in UDEV_PLACES:
        path = os.path.join(root, directory, MD_RULE)
        text = read_text(path)
        if text is not None:
            return {"md_rule": "/%s/%s" % (directory, MD_RULE), "md_rule_lists_members": lists_members(text)}
    return {}


def lists_members(rule: str) -> Optional[bool]:
    """Whether an md rule asks mdadm for the members too; None for a rule that does not ask mdadm for details at all."""
    asks = [line for line in lines(rule) if not line.lstrip().startswith("#") and "--detail" in line]
    return not any("--no-devices" in line for line in asks) if asks else None


def read_volume(mount_point: str, kernel: str, p2pdma: Optional[bool], root: str = "/") -> dict[str, Any]:
    stack = read_stack(mount_point, root)
    volume: dict[str, Any] = {
        "fs_type": stack.fs_type,
        "fs_options": stack.mount.options if stack.mount else (),
        "device": stack.device,
        "drives": tuple(leaf.name for leaf in stack.leaves),
        "drives_nvme": bool(stack.leaves) and all(leaf.kind == "nvme" for leaf in stack.leaves),
    }
    if stack.device is None:
        return volume
    levels, mapped, listed = [], [], None
    for name in devices_under(stack.device, root):
        base = device_directory(name, root)
        level = read_text(os.path.join(base, "md/level"))
        if level:
            levels.append(level)
            entry = read_text(
                os.path.join(root, "run/udev/data", "b%s" % (read_text(os.path.join(base, "dev")) or "none"))
            )
            if entry is not None:
                listed = listed is not False and "MD_DEVICE_" in entry
        if os.path.isdir(os.path.join(base, "dm")):
            mapped.append(name)
    volume.update(md_levels=tuple(levels), dm=tuple(mapped), md_members_in_udev=listed)
    volume["p2pdma_device"] = _takes_peer_pages(volume, kernel_version(kernel), p2pdma)
    return volume


def planned_volume(
    drives: tuple[str, ...], kernel: str, p2pdma: Optional[bool], md_rule: Optional[str], level: str
) -> dict[str, Any]:
    """The volume that is to be built over an array of ``drives``, as ``read_volume`` will read it.

    Without md it is the first of those on each drive, which are alike.
    """
    striped = level in LEVELS or not drives
    volume: dict[str, Any] = {
        "fs_type": BUILT.type,
        "device": "md0" if striped else drives[0],
        "drives": drives if striped else drives[:1],
        "drives_nvme": True,
        "md_levels": (level,) if striped else (),
        "dm": (),
        # Without a rule, mdadm is not installed yet: role node_packages comes later, and brings one.
        "md_members_in_udev": md_rule is None,
    }
    return {**volume, "p2pdma_device": _takes_peer_pages(volume, kernel_version(kernel), p2pdma)}


def _takes_peer_pages(volume: dict[str, Any], kernel: tuple[int, int], p2pdma: Optional[bool]) -> Optional[bool]:
    """Whether the mounted device accepts GPU pages in a direct request.

    The kernel shows that flag nowhere, so it follows from what is known: local NVMe drives take them, device mapper
    does not pass it on, md does in new kernels. A distribution's older kernel may carry that change: not known.
    """
    if not volume["drives_nvme"] or volume["dm"] or p2pdma is False:
        return False
    if p2pdma is None:
        return None
    if kernel < PEER_PAGES_SINCE:
        return False
    if not volume["md_levels"] or kernel >= PEER_PAGES_STACKED_SINCE:
        return True
    return None


def drive_addresses(drives: tuple[str, ...], root: str = "/") -> tuple[str, ...]:
    pci_addresses = []
    for name in drives:
        directory = os.path.realpath(device_directory(name, root))
        addresses = re.findall(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", directory)
        if addresses:
            pci_addresses.append(addresses[-1])
    return tuple(pci_addresses)
