"""md arrays: the assembled ones, the members' superblocks, and the steps to the wanted array."""

from __future__ import annotations

import glob
import math
import os
import re
from dataclasses import dataclass, replace
from typing import Mapping, Sequence

from ..common.commands import CommandError, run
from ..common.files import read_int, read_text, whole_number
from ..common.raid_levels import LEVELS, data_members, with_layout
from .drive_decisions import by_serial

_MOST_DISKS = 2**16
"""A superblock counts its members in 16 bits."""
_ASSEMBLE = "run `mdadm --stop` on it, then `mdadm --assemble --scan`"
DEAD_STATES: Mapping[str, str] = {
    "broken": "a RAID0 cannot lose a drive: replace it, then run `ansible-playbook tunetool.node.replace_drive`",
    "inactive": "not every member came in time: look for the missing ones, " + _ASSEMBLE,
    "clear": "somebody stopped it, its drives may be well: " + _ASSEMBLE,
}
"""``md/array_state`` values under which a RAID0 cannot serve I/O (kernel: Documentation/admin-guide/md.rst): their
causes and cures."""
_TOO_MANY = (
    "put one of them back, and reboot; or give its data up: `ansible-playbook tunetool.node.teardown`, then "
    "`tunetool provision`"
)
SUSPENDED = "suspended"
HALTED_STATES: Mapping[str, str] = {
    "readonly": "writes are refused: run `mdadm --readwrite` on it, after `dmesg` has shown why",
    SUSPENDED: "all I/O waits until somebody resumes it: write 0 to `md/suspend_lo` and `md/suspend_hi` of the array; "
    "a RAID0 has neither: `dmesg` and `pgrep -a mdadm` show what holds it, and where nothing does, reboot the node",
}
"""States of an array that is whole, and that somebody stopped: what they mean and what to do."""


_STOP = "end what uses it, unmount it, and let its name go: `mdadm --stop %s`"
LET_GO = _STOP + "; `tunetool provision` assembles it once its drives are back"
"""What to do about an array that is empty; takes its path."""


def cure_of(state: str, level: str) -> str | None:
    """What to do about an array of this level in this ``md/array_state``; None where it serves."""
    if state == "broken" and level in LEVELS and LEVELS[level].redundant:
        return _TOO_MANY
    return DEAD_STATES.get(state) or HALTED_STATES.get(state)


_SYNC_ACTIONS = ("resync", "recover", "check", "repair", "reshape")
"""``md/sync_action`` values under which the kernel itself reads or writes members (Documentation/admin-guide/md.rst).
The others are `idle` and `frozen`."""


@dataclass(frozen=True)
class Sync:
    """What the kernel does by itself on an array with redundancy."""

    action: str
    """Of ``md/sync_action``: ``recover`` fills a drive that came, ``resync`` makes all copies alike."""
    done: int = 0
    total: int = 0
    """Sectors."""
    kib_per_second: int = 0

    def __str__(self) -> str:
        percent = 100.0 * self.done / self.total if self.total else 0.0
        left = (self.total - self.done) / 2 / 60 / self.kib_per_second if self.kib_per_second else None
        return "%.1f %%, %s" % (percent, "about %d min left" % math.ceil(left) if left is not None else "waiting")


@dataclass(frozen=True)
class Array:
    """An assembled md device, from sysfs and the links of udev: no process, no root needed."""

    device: str
    """Kernel name, such as ``md127``: valid now, not after a reboot."""
    uuid: str | None
    name: str | None
    """Name of the array without md's host prefix."""
    level: str
    chunk_bytes: int
    raid_disks: int
    state: str
    members: tuple[str | None, ...]
    """Kernel names of the members by slot; None for a device that is gone."""
    device_number: str = ""
    rebuilding: tuple[str, ...] = ()
    """Kernel names of members that have not all of their data yet."""
    sync: Sync | None = None

    @property
    def path(self) -> str:
        """Device node, valid now."""
        return "/dev/" + self.device

    @property
    def lost_data(self) -> bool:
        """Whether a member is gone that no other one stands in for. Of an array that is none of ours nobody knows."""
        return bool(self.members) and self.level in LEVELS and not self.survives()

    def survives(self, without: str | None = None) -> bool:
        """Whether the members that have all of their data hold the array's, also without one of them."""
        gone = (None, without, *self.rebuilding)
        return LEVELS[self.level].serves([member not in gone for member in self.members])

    @property
    def empty(self) -> bool:
        """Whether it was running, and every drive of it is gone. It keeps its name, and takes none of them back."""
        return bool(self.members) and not any(self.members) and self.state not in ("inactive", "clear")

    def was(self, uuid: str) -> bool:
        """Whether it is empty, and was the array of this UUID."""
        return self.empty and self.uuid == uuid

    @property
    def degraded(self) -> bool:
        """Whether it serves without one of its members, or while one is filled."""
        return self.serves and (None in self.members or bool(self.rebuilding))

    @property
    def data_members(self) -> int:
        """The members that hold distinct data: the width of its stripe."""
        return data_members(self.level, self.raid_disks)

    @property
    def serves(self) -> bool:
        """Whether it answers I/O: a RAID0 whose drive was pulled still reports the state `clean`, and a read of a
        suspended array waits in a state in which no signal ends it."""
        return self.state not in (*DEAD_STATES, SUSPENDED) and not self.lost_data

    @property
    def fault(self) -> str | None:
        """Why it cannot be read and written, with the cure; None if nothing of the kernel's facts says so."""
        cure = cure_of(self.state, self.level)
        if self.empty and not (self.level in LEVELS and LEVELS[self.level].redundant):
            return "array `%s` has none of its drives any more: %s" % (self.device, LET_GO % self.path)
        if cure:
            return "array `%s` is %s: %s" % (self.device, self.state, cure)
        if not self.serves and LEVELS[self.level].redundant:
            return "array `%s` has lost more members than a %s can: %s" % (self.device, LEVELS[self.level], _TOO_MANY)
        if not self.serves:
            return "array `%s` has lost a member: %s" % (self.device, DEAD_STATES["broken"])
        return None


@dataclass(frozen=True)
class Superblock:
    """What ``mdadm --examine`` reads from one member."""

    device: str
    uuid: str
    name: str
    level: str
    raid_disks: int
    chunk_bytes: int
    role: int | None
    version: str = "1.2"
    created: str = ""
    """When the array was made, as mdadm prints it: two arrays may share a UUID, made one after the other."""
    data_offset_bytes: int | None = None
    """Offset in bytes of the array's data on this member."""


@dataclass(frozen=True)
class Wanted:
    """The array that the inventory asks for."""

    name: str
    level: str
    chunk_bytes: int
    members: tuple[str, ...]
    """Kernel names, in slot order."""


@dataclass(frozen=True)
class Step:
    """What to do: ``keep``, ``assemble``, ``create`` or ``refuse``; the reasons say what differs."""

    action: str
    uuid: str | None = None
    reasons: tuple[str, ...] = ()


def read_arrays(root: str = "/") -> list[Array]:
    """Every md device of the kernel, in any state."""
    arrays = []
    for base in sorted(glob.glob(os.path.join(root, "sys/block/md*/md"))):
        device = os.path.basename(os.path.dirname(base))
        disks = read_int(os.path.join(base, "raid_disks")) or 0
        raid_disks = disks if 0 <= disks <= _MOST_DISKS else 0
        members = tuple(_member(base, slot) for slot in range(raid_disks))
        arrays.append(
            Array(
                device=device,
                uuid=_link_value(root, "md-uuid-", device),
                name=_unprefixed(_link_value(root, "md-name-", device)),
                level=with_layout(read_text(os.path.join(base, "level")) or "", read_int(os.path.join(base, "layout"))),
                chunk_bytes=read_int(os.path.join(base, "chunk_size")) or 0,
                raid_disks=raid_disks,
                state=read_text(os.path.join(base, "array_state")) or "unknown",
                members=members,
                device_number=read_text(os.path.join(root, "sys/block", device, "dev")) or "",
                rebuilding=tuple(
                    member
                    for slot, member in enumerate(members)
                    if member and "in_sync" not in (read_text(_slot(base, slot, "state")) or "in_sync")
                ),
                sync=_sync(base),
            )
        )
    return [_as_mapped(root, each) if each.empty and each.uuid is None else each for each in arrays]


def _as_mapped(root: str, array: Array) -> Array:
    """Without a member udev reads no superblock, and takes the links by name and UUID away. mdadm's own map has both
    until the array is stopped, the UUID with the bytes of each word in the order of the machine (mdadm: mapfile.c)."""
    for line in (read_text(os.path.join(root, _MAP)) or "").splitlines():
        words = line.split()
        if len(words) == 4 and words[0] == array.device and re.fullmatch(r"[0-9a-f]{8}(:[0-9a-f]{8}){3}", words[2]):
            swapped = [bytes.fromhex(word)[::-1].hex() for word in words[2].split(":")]
            return replace(array, uuid=":".join(swapped), name=os.path.basename(words[3]))
    return array


_MAP = "run/mdadm/map"


def sync_actions(root: str = "/") -> dict[str, str]:
    """What the kernel does by itself on arrays with redundancy, by the array's kernel name: such as ``check``."""
    actions = {}
    for path in sorted(glob.glob(os.path.join(root, "sys/block/md*/md/sync_action"))):
        action = read_text(path)
        if action in _SYNC_ACTIONS:
            actions[os.path.basename(os.path.dirname(os.path.dirname(path)))] = action
    return actions


def _sync(base: str) -> Sync | None:
    action = read_text(os.path.join(base, "sync_action"))
    if action not in _SYNC_ACTIONS:
        return None
    numbers = [
        whole_number(word.strip()) or 0 for word in (read_text(os.path.join(base, "sync_completed")) or "").split("/")
    ]
    done, total = numbers if len(numbers) == 2 else (0, 0)
    return Sync(action, done, total, read_int(os.path.join(base, "sync_speed")) or 0)


def _slot(base: str, slot: int, name: str) -> str:
    return os.path.join(base, "rd%d" % slot, name)


def _member(base: str, slot: int) -> str | None:
    # The link md/rdN -> dev-nvme1n1, and in it block -> the device: dangling once the drive is gone.
    link = os.path.join(base, "rd%d" % slot)
    try:
        target = os.path.basename(os.readlink(link))
    except OSError:
        return None
    if not os.path.exists(os.path.join(link, "block")) or "faulty" in (read_text(_slot(base, slot, "state")) or ""):
        return None
    return target[len("dev-") :] if target.startswith("dev-") else target


def _link_value(root: str, prefix: str, device: str) -> str | None:
    directory = os.path.join(root, "dev/disk/by-id")
    for path in sorted(glob.glob(os.path.join(directory, prefix + "*"))):
        try:
            if os.path.basename(os.readlink(path)) == device:
                return os.path.basename(path)[len(prefix) :]
        except OSError:
            continue
    return None


def _unprefixed(name: str | None) -> str | None:
    return name.split(":")[-1] if name else None


def examine(devices: Sequence[str]) -> dict[str, Superblock]:
    """Superblocks of the devices ``/dev/NAME`` that carry one, by kernel name. Reads only; needs root.

    Raises ``CommandError`` also where mdadm could not open one of them: that is no device without a superblock.
    """
    if not devices:
        return {}
    # A drive with two labels of members is named twice by wipefs, and mdadm would print it twice.
    devices = list(dict.fromkeys(devices))
    # mdadm ends with 1 when any device carries no superblock, which is no error here, and also when it cannot read one.
    done = run(["mdadm", "--examine"] + ["/dev/" + device for device in devices], accept=(0, 1))
    closed = [line for line in done.stderr.splitlines() if "cannot open" in line]
    if closed:
        raise CommandError("`mdadm --examine` failed: %s" % "; ".join(closed[:3]))
    return parse_examine(done.stdout, devices)


def parse_examine(text: str, devices: Sequence[str] | None = None) -> dict[str, Superblock]:
    """Sections of ``mdadm --examine`` (1.x metadata), one per device; anything else is left out. ``devices``: the
    kernel names that it was asked about.

    Raises ``CommandError`` where a superblock's name holds lines of its own, which look like other fields or like
    another device's section.
    """
    superblocks: dict[str, Superblock] = {}
    seen: set[str] = set()
    for section in re.split(r"^(?=/dev/\S+:$)", text, flags=re.MULTILINE):
        device = re.match(r"/dev/(\S+):", section)
        if not device:
            continue
        if device.group(1) in seen:
            raise CommandError(_UNTRUSTED % ("", "`/dev/%s` twice" % device.group(1)))
        if devices is not None and device.group(1) not in devices:
            raise CommandError(_UNTRUSTED % ("", "`/dev/%s`, which was not asked about" % device.group(1)))
        seen.add(device.group(1))
        uuid = _field(section, "Array UUID")
        if not uuid:
            continue
        of = " of `%s`" % device.group(1)
        for name in _FIELDS:
            if len(_fields(section, name)) > 1:
                raise CommandError(_UNTRUSTED % (of, "`%s` twice" % name))
        # A name's 32 bytes may hold a section's head and its UUID, not its version too.
        if not _field(section, "Version"):
            raise CommandError(_UNTRUSTED % (of, "no `Version`"))
        role = re.match(r"Active device (\d+)", _field(section, "Device Role") or "")
        superblocks[device.group(1)] = Superblock(
            device=device.group(1),
            uuid=uuid,
            # "node1:nvme_raid0  (local to host node1)"
            name=(_field(section, "Name") or "").split()[0].split(":")[-1] if _field(section, "Name") else "",
            level=with_layout(_field(section, "Raid Level") or "", _field(section, "Layout")),
            raid_disks=max(0, whole_number(_field(section, "Raid Devices")) or 0),
            chunk_bytes=_chunk(_field(section, "Chunk Size")),
            role=whole_number(role.group(1)) if role else None,
            version=_field(section, "Version") or "",
            created=_field(section, "Creation Time") or "",
            data_offset_bytes=_sectors(_field(section, "Data Offset")),
        )
    return superblocks


_UNTRUSTED = "`mdadm --examine`%s prints %s, so a superblock's name is not to be trusted"
_FIELDS = (
    "Version",
    "Array UUID",
    "Name",
    "Creation Time",
    "Raid Level",
    "Raid Devices",
    "Data Offset",
    "Chunk Size",
    "Device Role",
    "Layout",
)


def _fields(section: str, name: str) -> list[str]:
    return re.findall(r"^\s*%s : (.+)$" % re.escape(name), section, flags=re.MULTILINE)


def _field(section: str, name: str) -> str | None:
    values = _fields(section, name)
    return values[0].strip() if values else None


def _sectors(text: str | None) -> int | None:
    match = re.match(r"(\d+) sectors", text or "")
    sectors = whole_number(match.group(1)) if match else None
    return None if sectors is None else sectors * 512


def _chunk(text: str | None) -> int:
    match = re.match(r"(\d+)([KMG]?)$", text or "")
    if not match:
        return 0
    return (whole_number(match.group(1)) or 0) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[match.group(2)]


def adopted(wanted: Wanted, superblocks: Mapping[str, Superblock]) -> Wanted:
    """``wanted`` with the name that all its members already carry, if they carry one; otherwise unchanged.

    Level, chunk and members stay as asked: ``decide`` refuses an array that differs in them.
    """
    names = {superblocks[member].name if member in superblocks else "" for member in wanted.members}
    versions = {superblock.version for superblock in superblocks.values()}
    one = len(names) == 1 and "" not in names and versions == {"1.2"}
    return replace(wanted, name=names.pop()) if one else wanted


def decide(
    wanted: Wanted,
    superblocks: Mapping[str, Superblock],
    arrays: Sequence[Array],
    serials: Mapping[str, str] | None = None,
) -> Step:
    """Decide how to get the array ``wanted``. ``serials``: the drives' by kernel name, for messages.

    All members without a superblock: create. All of them members of one array of the wanted name, level, chunk
    and size: keep it, or assemble it. Anything between is refused, with every difference named: its owner must decide
    which data to keep.
    """
    blocks = [superblocks[member] for member in wanted.members if member in superblocks]
    if blocks:
        uuid: str | None = min(block.uuid for block in blocks)
        own = [array for array in arrays if array.was(str(uuid))] or [
            array for array in arrays if array.uuid == uuid or set(wanted.members) & set(array.members)
        ][:1]
        # Udev assembles drive by drive: an inactive array is one whose members were not all there at that time.
        action = "keep" if own and own[0].state != "inactive" else "assemble"
        reasons = _unlike(wanted, superblocks, blocks, serials) or [
            reason for array in own for reason in _unfit(wanted, array, serials)
        ]
    else:
        others = [array for array in arrays if array.name == wanted.name][:1]
        uuid, action = others[0].uuid if others else None, "create"
        reasons = [
            "an array named `%s` (%s) %s"
            % (
                wanted.name,
                each.device,
                "has none of its drives any more: " + _STOP % each.path if each.empty else "exists on other drives",
            )
            for each in others
        ]
    return Step("refuse" if reasons else action, uuid, tuple(reasons))


def _unlike(
    wanted: Wanted,
    superblocks: Mapping[str, Superblock],
    blocks: Sequence[Superblock],
    serials: Mapping[str, str] | None,
) -> list[str]:
    """How what the members carry differs from what is wanted."""
    uuids = sorted({block.uuid for block in blocks})
    blank = [member for member in wanted.members if member not in superblocks]
    first, count = blocks[0], len(wanted.members)
    reasons = (
        (len(uuids) > 1, "the members belong to %d different arrays: %s" % (len(uuids), ", ".join(uuids))),
        (blank, "%s: no superblock, while the others have one" % by_serial(blank, serials)),
        (first.name != wanted.name, "name: expected `%s`, found `%s`" % (wanted.name, first.name)),
        (first.level != wanted.level, "level: expected %s, found %s" % (wanted.level, first.level)),
        (
            first.chunk_bytes != wanted.chunk_bytes,
            "chunk: expected %d bytes, found %d" % (wanted.chunk_bytes, first.chunk_bytes),
        ),
        (first.raid_disks != count, "members: expected %d, found %d" % (count, first.raid_disks)),
    )
    return [reason for differs, reason in reasons if differs]


def _unfit(wanted: Wanted, array: Array, serials: Mapping[str, str] | None) -> list[str]:
    """Why the array that runs over the members cannot be kept or assembled."""
    reasons = []
    if array.empty or (array.state in DEAD_STATES and array.state != "inactive") or array.state in HALTED_STATES:
        reasons.append(str(array.fault))
    elif array.state != "inactive" and set(array.members) != set(wanted.members):
        reasons.append("assembled `%s` has other members: %s" % (array.device, by_serial(array.members, serials)))
    return reasons


def find(arrays: Sequence[Array], uuid: str | None) -> Array | None:
    """The assembled array with that UUID; None if there is none."""
    return next((array for array in arrays if uuid and array.uuid == uuid), None)
