"""Replacing a member: the volume is removed only if the array with the new drive can be built. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Mapping, Sequence

from ..array.adopt_or_wipe import Consent
from ..array.drive_decisions import IGNORE, REFUSE, TAKE, WIPE, Criteria, Decision
from ..array.drive_selection import select
from ..array.drive_volumes import AnyVolume, ArrayVolume, by_serial_of, in_order, kept_volumes, standing
from ..array.numa_volumes import belongs
from ..machine.drive_contents import plain_uuid
from ..machine.drives import Drive
from .decision import Machine, Removal, Volume, plan_removal
from .drives import after_swap, broken_beside, plan_several


@dataclass(frozen=True)
class Swap:
    """The replacement of one drive by another."""

    old: str
    new: str
    criteria: Criteria
    """The inventory's conditions; ``serials``: those that it pins."""
    hashes: Mapping[str, str]
    """Hashes of idle drives' contents by kernel name, for a new drive that holds something."""


def plan_replacement(machine: Machine, name: str, mount_point: str, swap: Swap) -> Removal:
    """The removal with the new drive in the old one's slot, and every reason why the array could not be built."""
    if machine.volumes:
        return _plan_for_one_of_several(machine, mount_point, swap)
    removal = plan_removal(machine, name, mount_point)
    if removal.volume is None or machine.manifest is None:
        return replace(
            removal,
            done=False,
            problems=(
                "there is no manifest, so the members are unknown. hint: `tunetool provision` builds, and writes it",
            ),
        )
    serials = removal.volume.serials
    wanted = tuple(swap.new if serial == swap.old else serial for serial in serials)
    if swap.old not in serials and swap.new in serials:
        return _done(machine, serials, "`%s` is no longer a member, `%s` is one" % (swap.old, swap.new))
    if _is_built(machine, name, removal.volume, wanted):
        return _done(machine, wanted, "the new array is there already")
    problems = [*removal.problems, *wrong_serials(serials, swap), *_more_absent(removal, swap)]
    if problems:
        return replace(removal, problems=tuple(problems))
    return _with_new(replace(removal, serials=wanted), machine, swap)


def _plan_for_one_of_several(machine: Machine, mount_point: str, swap: Swap) -> Removal:
    """Only the volume of the old drive goes: all others keep their data, and one that is broken too is left alone."""
    serials = tuple(machine.volumes)
    if swap.old not in serials and swap.new in serials:
        reason = "`%s` is no longer a member, `%s` is one" % (swap.old, swap.new)
        return _done(machine, tuple(standing(machine.volumes)), reason)
    volume = machine.volumes.get(swap.old)
    broken = broken_beside(machine, swap.old)
    left = by_serial_of([each for each in broken if each.as_built is not None])
    removal = plan_several(machine, mount_point, only=swap.old)
    removal = replace(
        removal,
        left=tuple(dict.fromkeys(left.values())),
        decisions=tuple(
            Decision(row.drive, IGNORE, "volume `%s` is broken too, and is left alone" % left[row.drive.serial].name)
            if row.drive.serial in left
            else row
            for row in removal.decisions
        ),
    )
    alone = replace(removal, absent=tuple(serial for serial in removal.absent if serial not in left))
    problems = [*removal.problems, *wrong_serials(serials, swap), *_more_absent(alone, swap)]
    problems += [
        "drive `%s` of volume `%s` %s. hint: end what uses it; pull a dead one, and its volume is left alone"
        % (drive.serial, machine.volumes[drive.serial].name, machine.unreadable[drive.name])
        for drive in machine.drives
        if drive.name in machine.unreadable
        and machine.volumes.get(drive.serial, volume) != volume
        and drive.serial not in left
    ]
    going = [each for each in (volume, *removal.left) if each is not None]
    problems += [*_strangers_beside(machine, going), *_faults_beside(machine, going)]
    problems += [
        "drive `%s` is not on the NUMA node of volume `%s`. hint: put it into a slot of that node"
        % (drive.serial, volume.name)
        for drive in machine.drives
        if isinstance(volume, ArrayVolume) and drive.serial == swap.new and not _is_place(drive, volume, machine, swap)
    ]
    if problems:
        return replace(removal, problems=tuple(problems))
    wanted = tuple(swap.new if serial == swap.old else serial for serial in serials if serial not in left)
    return _with_new(after_swap(replace(removal, serials=wanted), machine, swap.old, swap.new), machine, swap)


def _strangers_beside(machine: Machine, others: Sequence[AnyVolume]) -> list[str]:
    """Drives of volumes but ``others`` that carry something else. Without a manifest one may be yet to be made."""
    stay = [volume for volume in in_order(machine.volumes) if volume not in others]
    signatures = [each for labels in machine.signatures.values() for each in labels]
    kept = kept_volumes(stay, {drive.name: drive.serial for drive in machine.drives}, signatures)
    problems = []
    for drive in machine.drives:
        volume = by_serial_of(stay).get(drive.serial)
        if volume is None or drive.serial in kept or drive.name in machine.unreadable:
            continue
        held = ", ".join([*map(str, machine.signatures.get(drive.name, ())), *drive.partitions])
        if held or machine.manifest is not None:
            problems.append(
                "drive `%s` holds %s, where volume `%s` was built. hint: nothing was changed; pull it, and its volume "
                "is left alone" % (drive.serial, held or "nothing", volume.name)
            )
    return problems


def _faults_beside(machine: Machine, others: Sequence[AnyVolume]) -> list[str]:
    """Why arrays could not be kept whose drives are all there, but those of ``others``: md may have lost one that came
    back. An inactive one is assembled."""
    return [
        "volume `%s`: %s; nothing was changed" % (volume.name, array.fault)
        for volume in in_order(machine.volumes)
        if isinstance(volume, ArrayVolume) and volume not in others
        for array in machine.arrays
        if plain_uuid(array.uuid) == plain_uuid(volume.uuid) and array.state != "inactive" and array.fault
    ]


def _is_place(drive: Drive, volume: ArrayVolume, machine: Machine, swap: Swap) -> bool:
    """Whether the drive is on the NUMA node of the volume's name, or beside all of its other drives: firmware may name
    other nodes than when the volume was made, or none."""
    beside = {each.numa_node for each in machine.drives if each.serial in volume.serials and each.serial != swap.old}
    unknown = all(each.numa_node is None for each in machine.drives)
    return belongs(drive.numa_node, volume) or beside == {drive.numa_node} or unknown


def _done(machine: Machine, serials: tuple[str, ...], reason: str) -> Removal:
    rows = tuple(
        Decision(drive, IGNORE, reason if drive.serial in serials else "not a member") for drive in machine.drives
    )
    return Removal(None, rows, serials=serials, done=True, note="nothing to remove: %s" % reason)


def _is_built(machine: Machine, name: str, volume: Volume, wanted: tuple[str, ...]) -> bool:
    """Whether a run was interrupted after it made the new array and before it wrote the manifest."""
    blocks = {
        drive.serial: machine.superblocks[drive.name] for drive in machine.drives if drive.name in machine.superblocks
    }
    uuids = {plain_uuid(blocks[serial].uuid) if serial in blocks else "" for serial in wanted}
    names = {blocks[serial].name for serial in wanted if serial in blocks}
    return len(uuids) == 1 and names == {name} and plain_uuid(volume.uuid) not in uuids


def wrong_serials(serials: Sequence[str], swap: Swap) -> list[str]:
    """Problems of the given serials, before any drive is read. ``serials``: the members'."""
    problems = []
    if swap.old not in serials:
        problems.append("`%s` is not a member. hint: the members are %s" % (swap.old, ", ".join(serials)))
    elif swap.new in serials:
        problems.append("`%s` is a member already. hint: name the drive that came for `%s`" % (swap.new, swap.old))
    pinned = swap.criteria.serials
    if pinned and (swap.new not in pinned or swap.old in pinned):
        problems.append(
            "`nvme_drives_serials` of the inventory does not name `%s` instead of `%s`. hint: edit it first"
            % (swap.new, swap.old)
        )
    return problems


def _more_absent(removal: Removal, swap: Swap) -> list[str]:
    gone = [serial for serial in removal.absent if serial != swap.old]
    if not gone:
        return []
    return [
        "more members are absent: %s. hint: put them back, or tear down and build with the drives there are"
        % ", ".join("`%s`" % serial for serial in gone)
    ]


def _with_new(removal: Removal, machine: Machine, swap: Swap) -> Removal:
    """Apply the rules of provisioning to the drives as they will be."""
    name = removal.volume.name if removal.volume else ""
    new = [drive for drive in machine.drives if drive.serial == swap.new]
    holding = [drive for drive in new if machine.signatures.get(drive.name) or drive.partitions]
    members = {drive.name for drive in removal.members}
    # Those that keep their volumes are not looked at: nothing is done with them.
    members |= {drive.name for drive in machine.drives if drive.serial in machine.volumes}
    after = [
        # Drives to wipe count as blank: members, and an unused new drive.
        replace(drive, uses=(), arrays=(), idle_arrays=(), partitions=())
        if drive.name in members or (drive in holding and not drive.claims)
        else drive
        for drive in machine.drives
    ]
    consent = Consent(level=machine.level)
    count = swap.criteria.count - sum(len(volume.serials) for volume in removal.left)
    criteria = replace(swap.criteria, serials=removal.serials, count=count)
    selection = select(after, {}, criteria, name, machine.unreadable, consent)
    ruled = {row.drive.name: row for row in selection.decisions if row.drive.serial in removal.serials}
    rows = []
    for row in removal.decisions:
        rule = ruled.get(row.drive.name)
        if rule is not None and rule.verdict != TAKE:
            rows.append(Decision(row.drive, REFUSE, rule.reason))
        elif row.drive in holding:
            rows.append(Decision(row.drive, WIPE, held_text(row.drive, machine)))
        elif row.drive in new:
            rows.append(Decision(row.drive, TAKE, "blank, comes for `%s`" % swap.old))
        else:
            rows.append(row)
    problem = selection.problem
    if not problem and holding and holding[0].name not in swap.hashes:
        problem = "drive `%s` cannot be hashed" % swap.new
    if problem:
        return replace(removal, decisions=tuple(rows), problems=("%s, so nothing could be built" % problem,))
    hashes = dict(removal.hashes or {})
    hashes.update((drive.serial, swap.hashes[drive.name]) for drive in holding)
    return replace(removal, decisions=tuple(rows), incoming=holding[0] if holding else None, hashes=hashes)


def held_text(drive: Drive, machine: Machine) -> str:
    """What a new drive holds."""
    signatures = machine.signatures.get(drive.name, ())
    return "comes in and holds %s" % (", ".join(map(str, signatures)) or ", ".join(drive.partitions))
