"""The storage under a directory: mount, block device, drives, and the drives' counters.

The counters prove that bytes moved: a program may claim anything, but a drive counts what it was sent.
"""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass
from typing import Sequence

from ..common.documents import read_bytes
from ..common.files import read_int, read_text, whole_number
from ..common.raid_levels import copies
from .drive_identity import identities
from .mounts import DEVICE_NUMBER, Mount, mount_holding, read_mounts
from .volume_members import named_device, volume_members

SECTOR = 512
"""/sys counts sectors of 512 bytes, whatever the drive's logical block is."""

_MILLISECONDS_WRAP = 2**32
"""The kernel prints its millisecond counters as 32 bits: at queue depth 512 they wrap within three hours."""

_NVME = re.compile(r"^nvme(\d+)n(\d+)$")
_LOOPS = 8
"""Loop devices on loop devices that are followed; the kernel's own limit is lower."""
_PAGE = 1 << 16
"""Bytes. A page of SCSI's vital product data has fewer."""
_MEMORY_DISK = re.compile(r"^(zram|ram|nullb)\d+$")
_MEMORY_SCSI = (("Linux", "scsi_debug"), ("LIO-ORG", "RAMDISK-MCP"))
"""Vendor and model of SCSI disks that are the kernel's memory (drivers/scsi/scsi_debug.c, target_core_rd.c)."""
_TARGET = "sys/kernel/config/nvmet/subsystems"
"""The node's own NVMe target (drivers/nvme/target/configfs.c)."""


class CountersChanged(Exception):
    """A drive vanished, came back or was reset between two readings, so their difference means nothing."""


@dataclass(frozen=True)
class Counters:
    """The counters of a block device since it appeared."""

    read_ios: int
    read_sectors: int
    read_ms: int
    """Milliseconds summed over requests: more than the wall clock if several are in flight."""
    write_ios: int
    write_sectors: int
    write_ms: int
    busy_ms: int
    """Milliseconds of wall clock with at least one request in flight."""

    def since(self, before: Counters) -> Counters:
        """The difference to ``before``. Raises ``CountersChanged`` if a counter ran backwards."""
        pairs = [
            (self.read_ios, before.read_ios),
            (self.read_sectors, before.read_sectors),
            (self.write_ios, before.write_ios),
            (self.write_sectors, before.write_sectors),
        ]
        if any(now < then for now, then in pairs):
            raise CountersChanged("the counters ran backwards")
        return Counters(
            read_ios=self.read_ios - before.read_ios,
            read_sectors=self.read_sectors - before.read_sectors,
            read_ms=(self.read_ms - before.read_ms) % _MILLISECONDS_WRAP,
            write_ios=self.write_ios - before.write_ios,
            write_sectors=self.write_sectors - before.write_sectors,
            write_ms=(self.write_ms - before.write_ms) % _MILLISECONDS_WRAP,
            busy_ms=(self.busy_ms - before.busy_ms) % _MILLISECONDS_WRAP,
        )

    def plus(self, other: Counters) -> Counters:
        """The sum of two devices."""
        return Counters(
            self.read_ios + other.read_ios,
            self.read_sectors + other.read_sectors,
            self.read_ms + other.read_ms,
            self.write_ios + other.write_ios,
            self.write_sectors + other.write_sectors,
            self.write_ms + other.write_ms,
            self.busy_ms + other.busy_ms,
        )

    def moved_bytes(self, direction: str) -> int:
        """Bytes in one direction, ``read`` or ``write``."""
        return (self.read_sectors if direction == "read" else self.write_sectors) * SECTOR

    def ios(self, direction: str) -> int:
        """Requests completed in one direction."""
        return self.read_ios if direction == "read" else self.write_ios

    def service_seconds(self, direction: str) -> float | None:
        """Mean time of one request, queueing in the drive included; None without requests."""
        ios = self.ios(direction)
        spent = self.read_ms if direction == "read" else self.write_ms
        return spent / 1000 / ios if ios else None


@dataclass(frozen=True)
class Leaf:
    """A drive at the bottom of the stack."""

    name: str
    kind: str
    """``nvme`` or ``disk``."""
    serial: str | None
    iostats: bool
    """False when ``queue/iostats`` is 0: such a device counts nothing."""
    counted_by: tuple[str, ...]
    """Kernel names whose counters are summed: the hidden paths of a multipath NVMe namespace, else itself."""

    @property
    def label(self) -> str:
        """The serial, which a person finds on the drive, else the kernel name."""
        return self.serial or self.name


@dataclass(frozen=True)
class BlockStack:
    """Everything between a directory and its drives."""

    directory: str
    mount: Mount | None
    fs_type: str
    device: str | None
    """Kernel name of the device that is mounted, such as ``md127``; None for tmpfs, overlay, NFS, and where the file
    system itself keeps several copies on its drives."""
    device_number: str | None
    medium: str
    """Name of the medium for people and records: ``md RAID0 (8 x nvme)``, ``disk``, ``tmpfs``."""
    leaves: tuple[Leaf, ...]
    redundant: bool
    """True if a layer writes more than it is asked to, or reads elsewhere (mirrors, parity)."""
    in_memory: bool
    """True for zram, brd, null_blk, scsi_debug and other disks in memory: they count bytes that reach no medium. Also
    where nobody knows what lies behind the node's own NVMe target."""
    device_iostats: bool = True
    """False when ``queue/iostats`` of the mounted device is 0."""
    parts: tuple[BlockStack, ...] = ()
    """Those of several volumes that are measured together, each with drives of its own."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Kernel names of the devices that are mounted: one for each volume that has one."""
        return tuple(part.device for part in self.parts or (self,) if part.device)

    @property
    def counts(self) -> tuple[str, ...]:
        """Kernel names of the devices whose bytes are compared with a program's claim; none where no sum is."""
        if self.parts:
            counted = [part.counts for part in self.parts]
            return tuple(dict.fromkeys(name for names in counted for name in names)) if all(counted) else ()
        if self.redundant:
            return (self.device,) if self.device else ()
        return tuple(leaf.name for leaf in self.leaves)

    @property
    def silent(self) -> tuple[str, ...]:
        """Devices that count nothing: the kernel names whose ``queue/iostats`` is off."""
        if self.parts:
            return tuple(name for part in self.parts for name in part.silent)
        if self.redundant:
            return () if self.device_iostats or not self.device else (self.device,)
        return tuple(leaf.name for leaf in self.leaves if not leaf.iostats)


def read_stack(directory: str, root: str = "/", depth: int = 0) -> BlockStack:
    """The stack under ``directory`` (as seen inside ``root``; links are resolved here).

    ``depth``: how many loop devices lie above it.
    """
    real = os.path.realpath(directory) if os.path.normpath(root) == "/" else os.path.normpath(directory)
    mount = mount_holding(real, read_mounts(root))
    name = _mounted_device(mount, root) if mount else None
    if mount is None or name is None:
        medium = mount.fs_type if mount else "unknown"
        return BlockStack(real, mount, medium, None, None, medium, (), redundant=False, in_memory=medium == "tmpfs")
    members = volume_members(mount, name, root)
    if members is None:
        medium = "%s on drives that are not known" % mount.fs_type
        return BlockStack(real, mount, mount.fs_type, None, None, medium, (), redundant=False, in_memory=False)
    walk = _Walk(root, depth)
    media = [walk.descend(each) for each in members.devices]
    medium = media[0]
    if len(media) > 1 or members.copies:
        medium = "%s (%s)" % (" ".join([mount.fs_type, *members.profile]), _kinds(walk.leaves))
    if members.copies:
        number = mount.device_number
        return BlockStack(real, mount, mount.fs_type, None, number, medium, tuple(walk.leaves), True, walk.in_memory)
    return BlockStack(
        directory=real,
        mount=mount,
        fs_type=mount.fs_type,
        device=name,
        device_number=read_text(os.path.join(root, "sys/class/block", name, "dev")) or mount.device_number,
        medium=medium,
        leaves=tuple(walk.leaves),
        redundant=walk.redundant,
        in_memory=walk.in_memory,
        device_iostats=read_int(os.path.join(device_directory(name, root), "queue/iostats")) != 0,
    )


def together(directory: str, parts: Sequence[BlockStack]) -> BlockStack:
    """Several volumes, which lie in ``directory``, as one stack; the only one as it is."""
    if len(parts) == 1:
        return parts[0]
    media = list(dict.fromkeys(part.medium for part in parts))
    return BlockStack(
        directory=directory,
        mount=None,
        fs_type=parts[0].fs_type,
        device=None,
        device_number=None,
        medium="%d x %s" % (len(parts), ", ".join(media)),
        leaves=tuple(dict.fromkeys(leaf for part in parts for leaf in part.leaves)),
        redundant=any(part.redundant for part in parts),
        in_memory=any(part.in_memory for part in parts),
        parts=tuple(parts),
    )


def devices_under(name: str, root: str = "/") -> list[str]:
    """Kernel names from ``name`` down to the drives, each once: partitions lead to their disk, arrays to members."""
    devices: list[str] = []
    waiting = [name]
    while waiting:
        device = waiting.pop(0)
        if device in devices:
            continue
        devices.append(device)
        base = device_directory(device, root)
        if os.path.exists(os.path.join(base, "partition")):
            waiting.append(os.path.basename(os.path.dirname(os.path.realpath(base))))
        else:
            waiting += _slaves(base)
    return devices


def snapshot(stack: BlockStack, root: str = "/") -> dict[str, Counters]:
    """Present counters by kernel name, of every leaf and of the mounted device. Raises ``CountersChanged``."""
    counters = {leaf.name: _sum([read_counters(name, root) for name in leaf.counted_by]) for leaf in stack.leaves}
    for device in stack.devices:
        if device not in counters:
            counters[device] = read_counters(device, root)
    return counters


def difference(after: dict[str, Counters], before: dict[str, Counters]) -> dict[str, Counters]:
    """The difference of each device between two snapshots. Raises ``CountersChanged``."""
    if set(after) != set(before):
        raise CountersChanged("the devices are not the same")
    changes = {}
    for name, counters in after.items():
        try:
            changes[name] = counters.since(before[name])
        except CountersChanged:
            raise CountersChanged("the counters of `%s` ran backwards" % name) from None
    return changes


def read_counters(name: str, root: str = "/") -> Counters:
    """Counters of one device. Raises ``CountersChanged`` when it is gone."""
    fields = (read_text(os.path.join(device_directory(name, root), "stat")) or "").split()
    numbers = [number for number in map(whole_number, fields[:10]) if number is not None and number >= 0]
    if len(numbers) < 10:
        raise CountersChanged("`%s` has no counters" % name)
    read_ios, _, read_sectors, read_ms, write_ios, _, write_sectors, write_ms, _, busy_ms = numbers
    return Counters(read_ios, read_sectors, read_ms, write_ios, write_sectors, write_ms, busy_ms)


def _sum(counters: list[Counters]) -> Counters:
    total = counters[0]
    for device in counters[1:]:
        total = total.plus(device)
    return total


def device_directory(name: str, root: str) -> str:
    """sysfs directory of a device, by its number, which is the kernel's own index except for hidden devices."""
    number = read_text(os.path.join(root, "sys/class/block", name, "dev"))
    if number and DEVICE_NUMBER.fullmatch(number):
        by_number = os.path.join(root, "sys/dev/block", number)
        if os.path.isdir(by_number):
            return by_number
    for directory in ("sys/class/block", "sys/block"):
        path = os.path.join(root, directory, name)
        if os.path.isdir(path):
            return path
    return os.path.join(root, "sys/class/block", name)


def _mounted_device(mount: Mount, root: str) -> str | None:
    by_number = os.path.join(root, "sys/dev/block", mount.device_number)
    if os.path.isdir(by_number):
        return os.path.basename(os.path.realpath(by_number))
    # btrfs mounts under an anonymous number: only the source names the device.
    return named_device(mount.source.partition(":/dev/")[0], root)


def _slaves(base: str) -> list[str]:
    try:
        return sorted(os.listdir(os.path.join(base, "slaves")))
    except OSError:
        return []


class _Walk:
    """Walks down through partitions, md, dm and loop devices to the drives."""

    def __init__(self, root: str, depth: int) -> None:
        self.root = root
        self._depth = depth
        self.leaves: list[Leaf] = []
        self.redundant = False
        self.in_memory = False
        self._seen: set[str] = set()

    def descend(self, name: str) -> str:
        """Collect the leaves under ``name``. Returns the name of the medium."""
        base = device_directory(name, self.root)
        if name in self._seen:
            return "disk"
        self._seen.add(name)
        if os.path.exists(os.path.join(base, "partition")):
            return self.descend(os.path.basename(os.path.dirname(os.path.realpath(base))))
        backing = read_text(os.path.join(base, "loop/backing_file"))
        if backing and self._depth < _LOOPS:
            return "loop device on " + self._backing(backing)
        if _over_loop(name, base, self.root) and self._depth < _LOOPS:
            return "nvme over loop on " + self._offered(base)
        below = _slaves(base)
        if not below:
            return self._leaf(name, base)
        first = len(self.leaves)
        for slave in below:
            self.descend(slave)
        return "%s (%s)" % (self._layer(base), _kinds(self.leaves[first:]))

    def _layer(self, base: str) -> str:
        level = read_text(os.path.join(base, "md/level"))
        if level:
            self.redundant = self.redundant or copies(level)
            return "md " + level.upper().replace("LINEAR", "linear")
        uuid = read_text(os.path.join(base, "dm/uuid")) or ""
        kind = uuid.split("-", 1)[0].lower()
        if kind not in ("crypt", "lvm"):
            self.redundant = True
        return "dm " + kind if kind else "dm"

    def _backing(self, path: str) -> str:
        # The bytes of a loop device may stop in the page cache: the medium of its file counts.
        stack = read_stack(path, self.root, self._depth + 1)
        known = {leaf.name for leaf in self.leaves}
        self.leaves += [leaf for leaf in stack.leaves if leaf.name not in known]
        self.redundant = self.redundant or stack.redundant
        self.in_memory = self.in_memory or stack.in_memory
        return stack.medium

    def _offered(self, base: str) -> str:
        """What lies behind a namespace of the node's own target: a block device, or a file."""
        nqn = read_text(os.path.join(base, "device/subsysnqn")) or ""
        number = read_text(os.path.join(base, "nsid")) or ""
        path = read_text(os.path.join(self.root, _TARGET, nqn, "namespaces", number, "device_path"))
        if not path:
            self.in_memory = True
            return "something unknown"
        device = os.path.basename(os.path.realpath(os.path.join(self.root, path.lstrip("/"))))
        if path.startswith("/dev/") and os.path.isdir(device_directory(device, self.root)):
            return self.descend(device)
        return self._backing(path)

    def _leaf(self, name: str, base: str) -> str:
        paths = _hidden_paths(name, self.root)
        kind = "nvme" if _NVME.match(name) else "disk"
        flags = [read_int(os.path.join(device_directory(path, self.root), "queue/iostats")) for path in paths]
        if name not in [leaf.name for leaf in self.leaves]:
            self.leaves.append(
                Leaf(
                    name=name,
                    kind=kind,
                    serial=_serial(name, base, self.root),
                    iostats=all(flag != 0 for flag in flags),
                    counted_by=tuple(paths),
                )
            )
        if _MEMORY_DISK.match(name):
            self.in_memory = True
            return re.sub(r"\d+$", "", name) + " (memory)"
        identity = tuple(read_text(os.path.join(base, "device", word)) for word in ("vendor", "model"))
        if identity in _MEMORY_SCSI:
            self.in_memory = True
            return "%s (memory)" % identity[1]
        return "nvme disk" if kind == "nvme" else "disk"


def _over_loop(name: str, base: str, root: str) -> bool:
    """Whether an NVMe namespace comes from the node's own target. A head of several paths has them below it."""
    match = _NVME.match(name)
    if not match:
        return False
    controllers = sorted(glob.glob(os.path.join(base, "device/nvme[0-9]*")))
    places = [os.path.join(base, "device"), *controllers, os.path.join(root, "sys/class/nvme/nvme%s" % match.group(1))]
    return "loop" in [read_text(os.path.join(place, "transport")) for place in places]


def _kinds(leaves: list[Leaf]) -> str:
    kinds = sorted({leaf.kind for leaf in leaves})
    return ", ".join("%d x %s" % (sum(leaf.kind == kind for leaf in leaves), kind) for kind in kinds)


def _hidden_paths(name: str, root: str) -> list[str]:
    """Devices that count for ``name``. Before Linux 6.4 a multipath NVMe head counts nothing, its paths do."""
    match = _NVME.match(name)
    if match:
        pattern = os.path.join(root, "sys/block", "nvme%sc*n%s" % match.groups())
        hidden = sorted(path for path in glob.glob(pattern) if os.path.exists(os.path.join(path, "stat")))
        if hidden:
            return [os.path.basename(path) for path in hidden]
    return [name]


def _serial(name: str, base: str, root: str) -> str | None:
    match = _NVME.match(name)
    if match:
        identity = identities(root).get(name)
        # Another recording may know the controller by its class alone.
        return identity or read_text(os.path.join(root, "sys/class/nvme/nvme%s/serial" % match.group(1))) or None
    for path in (os.path.join(base, "device/serial"), os.path.join(base, "serial")):
        serial = read_text(path)
        if serial:
            return serial
    return _scsi_serial(os.path.join(base, "device/vpd_pg80"))


def _scsi_serial(path: str) -> str | None:
    # SCSI's unit serial number page: four bytes of header, then the text.
    try:
        page = read_bytes(path, _PAGE)
    except OSError:
        return None
    return page[4:].decode("ascii", "replace").strip("\0 ") or None


def active_scheduler(name: str, root: str = "/") -> str | None:
    """``none`` or ``mq-deadline``, the one in brackets; None if unknown."""
    text = read_text(os.path.join(root, "sys/block", name, "queue/scheduler"))
    match = re.search(r"\[([^\]]+)\]", text or "")
    return match.group(1) if match else None
