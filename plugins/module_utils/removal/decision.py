"""Decides about removing the scratch volume: its parts, what would be lost, and reasons against it. Only reads."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any, Mapping, Sequence

from ..array.drive_decisions import IGNORE, REFUSE, WIPE, Decision
from ..array.drive_volumes import AnyVolume, in_order
from ..array.md_arrays import HALTED_STATES, Array, Superblock
from ..common.manifest import each_volume
from ..common.raid_levels import DEFAULT
from ..machine.drive_contents import RAID_MEMBER, Signature, plain_uuid
from ..machine.drives import Drive
from ..machine.file_system import BUILT
from ..plan.plan_file import drive_part
from .erasure import NONE, Way

NOT_A_MEMBER = "not a member"


@dataclass(frozen=True)
class Machine:
    """The facts of a node that a removal depends on, read at one time."""

    drives: Sequence[Drive]
    signatures: Mapping[str, Sequence[Signature]]
    """Signatures by kernel name of the drive, including its partitions'."""
    superblocks: Mapping[str, Superblock]
    arrays: Sequence[Array]
    under: Mapping[str, frozenset[str]]
    """Kernel names of the disks under each md device."""
    inside: Mapping[str, Sequence[Signature]]
    """The labels in each md device that can be read, by kernel name."""
    manifest: Mapping[str, Any] | None
    unreadable: Mapping[str, str]
    volumes: Mapping[str, AnyVolume] = field(default_factory=dict)
    """The volumes by the serials of their drives, where there are several."""

    @property
    def level(self) -> str:
        """Of the array that was built, and will be again."""
        if self.volumes:
            return in_order(self.volumes)[0].level
        return str(self.manifest["array"]["level"]) if self.manifest else DEFAULT

    @property
    def parts(self) -> Mapping[str, Mapping[str, Any]]:
        """What the manifest says of each of several volumes, by name. Where there is none, those that were left alone
        are noted with what it said: no drive of them need tell their file system's UUID any more."""
        if self.manifest:
            return {name: volume for name, volume in each_volume(self.manifest) if name}
        return {volume.name: volume.as_built for volume in self.volumes.values() if volume.as_built}

    @property
    def points(self) -> Mapping[str, str]:
        """The mount points of several volumes, by the volume's name, as they were built."""
        return {name: part["filesystem"]["mount_point"] for name, part in self.parts.items()}


@dataclass(frozen=True)
class Place:
    """Where a volume is mounted, and what it is on."""

    mount_point: str
    filesystem_uuid: str | None
    arrays: tuple[Array, ...]
    """The md devices, or the drive; none where that is gone."""
    name: str = ""
    """The volume's, where it is one of several."""
    array_uuid: str = ""
    """Of the array that mdadm.conf names; empty where there is none."""
    serials: tuple[str, ...] = ()
    """Of the drives that lose something, where it is one of several."""


@dataclass(frozen=True)
class Volume:
    """The scratch volume, from the manifest, or from the superblocks with its name."""

    name: str
    uuid: str
    """Creation time as mdadm prints it."""
    filesystem_uuid: str | None
    mount_point: str
    serials: tuple[str, ...]
    """Serials of the members, some of which may be absent."""


@dataclass(frozen=True)
class Removal:
    """What a removal would do. With ``problems`` it does nothing."""

    volume: Volume | None
    decisions: tuple[Decision, ...]
    problems: tuple[str, ...] = ()
    members: tuple[Drive, ...] = ()
    """Members that are present and not blank; they lose their labels."""
    incoming: Drive | None = None
    """The new drive, if it holds something."""
    absent: tuple[str, ...] = ()
    arrays: tuple[Array, ...] = ()
    """The md devices over the members."""
    hashes: Mapping[str, str] | None = None
    """Hashes by serial, of the drives that lose something."""
    inside: str | None = None
    """Hash of the array's contents; None if it does not run."""
    holds: tuple[str, ...] = ()
    serials: tuple[str, ...] = ()
    """For a replacement: the members of the new array, in slot order."""
    erase: str = NONE
    """What ``teardown_erase`` asks for."""
    ways: tuple[Way, ...] = ()
    """How each member is erased."""
    done: bool = False
    """True if there is nothing to do: no volume, or the drive is replaced already."""
    places: tuple[Place, ...] = ()
    """Where there are several volumes, those that go."""
    noted: tuple[AnyVolume, ...] = ()
    """For a replacement there: the volumes as they will be."""
    left: tuple[AnyVolume, ...] = ()
    """For a replacement there: other volumes that are broken too, which it leaves alone."""
    note: str = "nothing to remove"
    """The message in that case."""


def find_volume(machine: Machine, name: str, mount_point: str) -> tuple[Volume | None, list[str]]:
    """The volume, and the problems with it."""
    if machine.manifest is not None:
        array, filesystem = machine.manifest["array"], machine.manifest["filesystem"]
        volume = Volume(
            array["name"],
            array["uuid"],
            filesystem["uuid"],
            filesystem["mount_point"],
            tuple(member["serial"] for member in array["members"]),
        )
        return volume, []
    blocks = {device: block for device, block in machine.superblocks.items() if block.name == name}
    uuids = sorted({block.uuid for block in blocks.values()})
    if not uuids:
        return None, []
    superblocks = {drive.serial: blocks[drive.name] for drive in machine.drives if drive.name in blocks}
    serials = tuple(
        sorted(superblocks, key=lambda serial: (superblocks[serial].role is None, superblocks[serial].role or 0))
    )
    inside = _inside(machine, arrays_over(machine, set(blocks))) or ()
    filesystem_uuid = next((signature.uuid for signature in inside if signature.type == BUILT.type), None)
    volume = Volume(name, uuids[0], filesystem_uuid, mount_point, serials)
    if len(uuids) > 1:
        return volume, ["there are %d arrays named `%s`: %s" % (len(uuids), name, ", ".join(uuids))]
    return volume, []


def arrays_over(machine: Machine, names: set[str]) -> list[Array]:
    """The md devices over these drives in any state: one, or the parts of one that lost a member."""
    return [array for array in machine.arrays if machine.under.get(array.device, frozenset()) & names]


def emptied(machine: Machine, volume: Volume) -> list[Array]:
    """The md device of the volume's array, where no drive is left beneath it: it keeps its name until it is stopped,
    and may be mounted."""
    return [array for array in machine.arrays if array.was(volume.uuid) and not machine.under.get(array.device)]


def _inside(machine: Machine, arrays: Sequence[Array]) -> Sequence[Signature] | None:
    """The labels in the array that can be read; None if none can."""
    return next((machine.inside[array.device] for array in arrays if array.device in machine.inside), None)


def plan_removal(machine: Machine, name: str, mount_point: str, serials: Sequence[str] = ()) -> Removal:
    """Decide about every drive. ``serials``: those of the members, where they are known without a manifest."""
    volume, problems = find_volume(machine, name, mount_point)
    if volume is not None and serials:
        volume = replace(volume, serials=tuple(serials))
    if volume is None:
        return Removal(None, tuple(Decision(drive, IGNORE, NOT_A_MEMBER) for drive in machine.drives), done=True)
    rows, members = [], []
    for drive in machine.drives:
        row = _row(drive, volume, machine)
        rows.append(row)
        if row.verdict == WIPE:
            members.append(drive)
        elif row.verdict == REFUSE:
            problems.append("drive `%s` (%s) %s" % (drive.serial, drive.name, row.reason))
    seen = [drive.serial for drive in machine.drives]
    problems += ["serial `%s` is on several drives" % double for double in volume.serials if seen.count(double) > 1]
    arrays = arrays_over(machine, {drive.name for drive in members})
    arrays += emptied(machine, volume)
    # An unmount or a read of it would wait for ever, and a wipe of its labels would fail half-way.
    problems += ["%s; nothing was changed" % array.fault for array in arrays if array.state in HALTED_STATES]
    inside = _inside(machine, arrays)
    return Removal(
        volume=volume,
        decisions=tuple(rows),
        problems=tuple(problems),
        members=tuple(members),
        absent=tuple(serial for serial in volume.serials if serial not in seen),
        arrays=tuple(arrays),
        hashes={drive.serial: member_hash(drive, machine.superblocks[drive.name]) for drive in members},
        inside=inside_hash(volume.uuid, inside) if inside is not None else None,
        holds=tuple(map(str, inside or ())),
    )


def _row(drive: Drive, volume: Volume, machine: Machine) -> Decision:
    """The decision for one drive: a member to wipe, a blank one, an obstacle, or not a member."""
    carries = _carries(machine.superblocks.get(drive.name), volume)
    if not carries and drive.serial not in volume.serials:
        return Decision(drive, IGNORE, NOT_A_MEMBER)
    if drive.name in machine.unreadable:
        return Decision(drive, REFUSE, machine.unreadable[drive.name])
    if carries:
        fault = _member_fault(drive, volume, machine)
        return Decision(drive, REFUSE, fault) if fault else Decision(drive, WIPE, "member of `%s`" % volume.name)
    what = ["holds %s" % signature for signature in machine.signatures.get(drive.name, ())]
    what += [*drive.uses, *("has partition %s" % name for name in drive.partitions)]
    if what:
        return Decision(drive, REFUSE, "%s, where the manifest has a member of another array" % "; ".join(what))
    return Decision(drive, IGNORE, "blank already")


def _carries(block: Superblock | None, volume: Volume) -> bool:
    return block is not None and plain_uuid(block.uuid) == plain_uuid(volume.uuid)


def _member_fault(drive: Drive, volume: Volume, machine: Machine) -> str | None:
    """The problem of a drive that carries the array's label; None for a plain member."""
    if drive.serial not in volume.serials:
        return "carries the label of `%s` and is not in the manifest" % volume.name
    more = [
        str(signature)
        for signature in machine.signatures.get(drive.name, ())
        if signature.type != RAID_MEMBER or signature.device != drive.name
    ]
    if more or drive.partitions:
        return "holds more than the array: %s" % ", ".join([*more, *drive.partitions])
    under = {name for array in drive.arrays for name in machine.under.get(array, frozenset())}
    strangers = sorted(name for name in under if not _carries(machine.superblocks.get(name), volume))
    if strangers:
        return "is in an array with drives of another: %s" % ", ".join(strangers)
    # The users of the mounted volume are checked when it is unmounted.
    mounted = tuple("(through %s)" % array for array in drive.arrays)
    claims = [
        use
        for use in drive.uses
        if use not in {"member of `%s`" % array for array in drive.arrays}
        and not (mounted and use.startswith("mounted at ") and use.endswith(mounted))
    ]
    return "; ".join(claims) or None


def member_hash(drive: Drive, block: Superblock) -> str:
    """A hash that identifies this membership; no write of a job changes it."""
    level = [block.uuid, block.created, block.name, block.level, block.chunk_bytes, block.raid_disks, block.role]
    return digest(["member", drive.serial, drive.size_bytes, drive.lba_bytes, *level])


def inside_hash(uuid: str, signatures: Sequence[Signature]) -> str:
    """A hash that identifies the file system in the array; no write into it changes it."""
    return digest(
        [
            "inside",
            plain_uuid(uuid),
            sorted([signature.type, signature.uuid or "", signature.label or ""] for signature in signatures),
        ]
    )


def digest(parts: list[Any]) -> str:
    """A hash of facts."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def consent_problem(removal: Removal, wipes: Mapping[str, str], volume: Mapping[str, Any] | None) -> str | None:
    """Why the applied plan does not allow this; None if it does, or if nothing would be lost."""
    # Absent members cannot be read; the owner decides about a drive to be replaced.
    unseen = removal.absent and not removal.serials
    if removal.volume is None or not (removal.members or removal.incoming or unseen):
        return None
    if not volume:
        return "nothing is removed without a plan"
    stale = None
    if (volume.get("erase") or NONE) != removal.erase:
        stale = "it has `teardown_erase: %s`, this run `%s`" % (volume.get("erase") or NONE, removal.erase)
    elif plain_uuid(volume["uuid"]) != plain_uuid(removal.volume.uuid):
        stale = "it names array %s, this is %s" % (volume["uuid"], removal.volume.uuid)
    elif removal.holds and removal.inside != volume["hash"]:
        # A file system that an interrupted run has wiped already is not a loss.
        stale = "the array holds something else since, %s" % ", ".join(removal.holds)
    for serial, digest in (removal.hashes or {}).items():
        if serial not in wipes:
            stale = stale or "it does not name drive `%s`" % serial
        elif wipes[serial] != digest:
            stale = stale or "drive `%s` changed since" % serial
    return "not what the plan saw: %s" % stale if stale else None


def removal_part(removal: Removal, text: str) -> dict[str, Any]:
    """Make one host's part of a plan that removes a volume."""
    action = "refuse" if removal.problems else "nothing" if removal.done else "remove"
    hashes = removal.hashes or {}
    drives = []
    for row in removal.decisions:
        wiped = row.verdict == WIPE and action == "remove"
        verdict = WIPE if wiped else REFUSE if row.verdict == WIPE else row.verdict
        drives.append(drive_part(row, verdict, (), hashes.get(row.drive.serial) if wiped else None))
    part: dict[str, Any] = {"drives": drives, "array_action": action, "array_reason": text}
    if action == "remove" and removal.volume is not None:
        part["volume"] = {
            "uuid": removal.volume.uuid,
            "hash": removal.inside,
            "holds": list(removal.holds),
            "erase": removal.erase,
        }
    return part
