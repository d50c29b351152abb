"""The NVMe drives of a machine, read from sysfs: what they are, how they are linked, who uses them."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass
from typing import Any

from ..common.files import read_int, read_text, whole_number
from .drive_identity import NAMESPACE, PCI_ADDRESS, controller_of, identities
from .mounts import Mount, read_mounts, swap_sources
from .volume_members import named_device, volume_members

SECTOR = 512
"""sysfs counts ``size`` in units of 512 bytes, whatever the drive's logical block is."""


@dataclass(frozen=True)
class Link:
    """A PCIe link as negotiated and as possible. Speeds in GT/s, widths in lanes; None if unknown."""

    current_speed_gts: float | None = None
    current_width: int | None = None
    max_speed_gts: float | None = None
    max_width: int | None = None
    slot_max_speed_gts: float | None = None
    """Speed and width of the port above the device: a slot, or a switch's port."""
    slot_max_width: int | None = None


MEMBER_KEYS = ("serial", "model", "by_id", "size_bytes", "pci_address", "numa_node")


@dataclass(frozen=True)
class Drive:
    """One NVMe namespace."""

    name: str
    """Kernel name, such as ``nvme3n1``: changes over reboots, for messages only."""
    serial: str
    """What it is known by: its serial number, with more where others of the machine share that (`identities`)."""
    model: str
    firmware: str
    size_bytes: int
    lba_bytes: int
    """Logical block: 512 or 4096."""
    metadata_bytes: int
    """Metadata bytes per logical block; md and XFS need 0."""
    transport: str
    pci_address: str | None
    numa_node: int | None
    by_id: str | None
    link: Link
    controller: str = ""
    """Kernel name of the controller, such as ``nvme3``: its number may differ from the namespace's."""
    uses: tuple[str, ...] = ()
    """Why the drive is in use: mounts, swap, holders, open partitions. Empty if nothing uses it."""
    partitions: tuple[str, ...] = ()
    arrays: tuple[str, ...] = ()
    """Names of md devices that hold the whole drive as a member."""
    idle_arrays: tuple[str, ...] = ()
    """md devices over the drive or its partitions that nothing uses: no mount, swap or further holder."""

    @property
    def claims(self) -> tuple[str, ...]:
        """The uses that remain when its idle arrays are stopped."""
        idle = {_member_of(array) for array in self.idle_arrays}
        return tuple(use for use in self.uses if use not in idle)

    @property
    def member(self) -> dict[str, Any]:
        """The drive as a member of the array in the manifest."""
        return {name: getattr(self, name) for name in MEMBER_KEYS}

    @property
    def path(self) -> str:
        """Device node, valid now."""
        return "/dev/" + self.name


def read_drives(root: str = "/") -> list[Drive]:
    """Every NVMe namespace, sorted by PCI address and name."""
    block = os.path.join(root, "sys/block")
    try:
        names = sorted(name for name in os.listdir(block) if NAMESPACE.match(name))
    except OSError:
        return []
    links = _by_id_links(root)
    users = _Users(root)
    known_by = identities(root)
    drives = [_read_drive(root, name, known_by.get(name, ""), links.get(name, []), users) for name in names]
    return sorted(drives, key=lambda drive: (drive.pci_address or "~", drive.name))


def _read_drive(root: str, name: str, identity: str, links: list[str], users: _Users) -> Drive:
    base = os.path.join(root, "sys/block", name)
    controller = controller_of(base)
    serial = read_text(os.path.join(controller, "serial")) or ""
    pci_address = read_text(os.path.join(controller, "address"))
    device = os.path.join(controller, "device")
    return Drive(
        name=name,
        serial=identity,
        model=read_text(os.path.join(controller, "model")) or "",
        firmware=read_text(os.path.join(controller, "firmware_rev")) or "",
        size_bytes=(read_int(os.path.join(base, "size")) or 0) * SECTOR,
        lba_bytes=read_int(os.path.join(base, "queue/logical_block_size")) or SECTOR,
        metadata_bytes=_metadata_bytes(base),
        transport=read_text(os.path.join(controller, "transport")) or "",
        pci_address=pci_address,
        numa_node=_numa_node(controller, device),
        # A link with a serial that several share leads to any of them.
        by_id=_best_link([link for link in links if identity == serial or not link.endswith("_" + serial)], serial),
        link=read_link(device),
        controller=os.path.basename(os.path.realpath(controller)),
        uses=tuple(users.of(name)),
        partitions=tuple(partitions_of(root, name)),
        arrays=tuple(holder for holder in holders_of(root, name) if holder.startswith("md")),
        idle_arrays=tuple(users.idle_arrays_on(name)),
    )


def _metadata_bytes(base: str) -> int:
    direct = read_int(os.path.join(base, "metadata_bytes"))
    if direct is not None:
        return direct
    # Kernels without that attribute still describe protection information here.
    form = read_text(os.path.join(base, "integrity/format"))
    if form in (None, "", "none"):
        return 0
    return max(8, read_int(os.path.join(base, "integrity/tag_size")) or 0)


def _numa_node(controller: str, device: str) -> int | None:
    for path in (os.path.join(controller, "numa_node"), os.path.join(device, "numa_node")):
        node = read_int(path)
        if node is not None:
            # The kernel reports -1 if the firmware names no node.
            return node if node >= 0 else None
    return None


def read_link(device: str) -> Link:
    """The PCIe link of a device directory in sysfs, with what the port above it can do."""
    port = os.path.dirname(os.path.realpath(device))
    if not PCI_ADDRESS.match(os.path.basename(port)):
        port = ""
    return Link(
        current_speed_gts=_gigatransfers(read_text(os.path.join(device, "current_link_speed"))),
        current_width=_lanes(read_text(os.path.join(device, "current_link_width"))),
        max_speed_gts=_gigatransfers(read_text(os.path.join(device, "max_link_speed"))),
        max_width=_lanes(read_text(os.path.join(device, "max_link_width"))),
        slot_max_speed_gts=_gigatransfers(read_text(os.path.join(port, "max_link_speed"))) if port else None,
        slot_max_width=_lanes(read_text(os.path.join(port, "max_link_width"))) if port else None,
    )


def _gigatransfers(text: str | None) -> float | None:
    match = re.match(r"([0-9]{1,4}(?:\.[0-9]{1,4})?)\s*GT/s", text or "")
    return float(match.group(1)) if match else None


def _lanes(text: str | None) -> int | None:
    # The kernel reports 0 and 255 for "unknown".
    lanes = whole_number(text)
    return lanes if lanes is not None and 0 < lanes < 255 else None


def _by_id_links(root: str) -> dict[str, list[str]]:
    links: dict[str, list[str]] = {}
    for path in glob.glob(os.path.join(root, "dev/disk/by-id/nvme-*")):
        try:
            target = os.path.basename(os.readlink(path))
        except OSError:
            continue
        links.setdefault(target, []).append("/dev/disk/by-id/" + os.path.basename(path))
    return links


def _best_link(links: list[str], serial: str) -> str | None:
    """The most readable of several links: with the serial and without a namespace suffix."""
    ranked = sorted(links, key=lambda link: (not (serial and link.endswith("_" + serial)), len(link), link))
    return ranked[0] if ranked else None


def partitions_of(root: str, name: str) -> list[str]:
    """Kernel names of the partitions of a disk."""
    base = os.path.join(root, "sys/block", name)
    try:
        entries = sorted(os.listdir(base))
    except OSError:
        return []
    return [entry for entry in entries if os.path.exists(os.path.join(base, entry, "partition"))]


def holders_of(root: str, name: str) -> list[str]:
    """Kernel names of the md and dm devices built directly on a disk or partition."""
    path = os.path.join(root, "sys/class/block", name, "holders")
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def disks_under(root: str, array: str) -> set[str]:
    """Kernel names of the present whole disks directly beneath an md device, active or not."""
    slaves = os.path.join(root, "sys/block", array, "slaves")
    try:
        # A drive that was pulled leaves its link behind.
        below = [name for name in os.listdir(slaves) if os.path.exists(os.path.join(slaves, name))]
    except OSError:
        return set()
    disks = set()
    for name in below:
        directory = os.path.join(root, "sys/class/block", name)
        # A partition's directory lies in its disk's.
        whole = os.path.basename(os.path.dirname(os.path.realpath(directory)))
        disks.add(whole if os.path.exists(os.path.join(directory, "partition")) else name)
    return disks


def _member_of(holder: str) -> str:
    return "member of `%s`" % holder


class _Users:
    """The users of a block device, through partitions, md and dm, up to mounts and swap."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._mounts: dict[str, list[Mount]] = {}
        # btrfs and others mount under an anonymous device number, and a file system may span several devices.
        self._by_member: dict[str, list[Mount]] = {}
        for mount in read_mounts(root):
            self._mounts.setdefault(mount.device_number, []).append(mount)
            named = named_device(mount.source.split(":/dev/")[0], root)
            members = volume_members(mount, named, root) if named else None
            for device in members.devices if members else [named] if named else []:
                self._by_member.setdefault(device, []).append(mount)
        self._swaps = _swap_names(root)
        self._pooled = _pooled(root)

    def of(self, name: str) -> list[str]:
        reasons = self._direct(name)
        for partition in partitions_of(self._root, name):
            reasons += ["%s (partition %s)" % (reason, partition) for reason in self._direct(partition)]
            reasons += self._held(partition, (name,))
        reasons += self._held(name, ())
        return list(dict.fromkeys(reasons))

    def idle_arrays_on(self, name: str) -> list[str]:
        """md devices over the disk or its partitions that carry nothing in use."""
        below = [name, *partitions_of(self._root, name)]
        holders = [holder for device in below for holder in holders_of(self._root, device)]
        arrays = [holder for holder in dict.fromkeys(holders) if re.match(r"md\d+$|md_", holder)]
        return [holder for holder in arrays if not self.of(holder)]

    def _direct(self, name: str) -> list[str]:
        number = read_text(os.path.join(self._root, "sys/class/block", name, "dev")) or "?"
        reasons = ["mounted at `%s`" % mount.mount_point for mount in self._mounts.get(number, [])]
        reasons += ["mounted at `%s`" % mount.mount_point for mount in self._by_member.get(name, [])]
        reasons += self._pooled.get(name, ())
        if name in self._swaps:
            reasons.append("active swap")
        return reasons

    def _held(self, name: str, below: tuple[str, ...]) -> list[str]:
        reasons: list[str] = []
        # No kernel builds a device on itself; a recorded tree may say so.
        below = (*below, name)
        for holder in holders_of(self._root, name):
            if holder in below:
                continue
            reasons.append(_member_of(holder))
            reasons += ["%s (through %s)" % (reason, holder) for reason in self._direct(holder)]
            for partition in partitions_of(self._root, holder):
                reasons += ["%s (through %s)" % (reason, partition) for reason in self._direct(partition)]
                if partition not in below:
                    reasons += self._held(partition, (*below, holder))
            reasons += self._held(holder, below)
        return reasons


def _pooled(root: str) -> dict[str, list[str]]:
    """The file system by kernel name, for each member of a btrfs or bcachefs that runs in any mount namespace."""
    members: dict[str, list[str]] = {}
    for pattern, kind in (("btrfs/*/devices/*", "btrfs"), ("bcachefs/*/dev-*/block", "bcachefs")):
        for path in sorted(glob.glob(os.path.join(root, "sys/fs", pattern))):
            uuid = os.path.relpath(path, os.path.join(root, "sys/fs", kind)).split(os.sep)[0]
            members.setdefault(os.path.basename(os.path.realpath(path)), []).append(
                "in a mounted %s `%s`" % (kind, uuid)
            )
    return members


def _swap_names(root: str) -> set[str]:
    return {os.path.basename(source) for source in swap_sources(root)}
