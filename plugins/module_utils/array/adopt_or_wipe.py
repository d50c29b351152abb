"""Arrays and drives that are not blank: which the owner allows to be adopted with their data, or to be wiped.

Also arrays of ours whose creation was cut off: some drives carry a superblock, the rest are blank. Such a one can never
be whole, and nothing was ever stored in it. It looks like one whose other members came too late, whose data may be
whole: what tells them apart is read here, and a doubt counts against giving anything up.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Collection, Mapping, Sequence

from ..common.raid_levels import DEFAULT, LEVELS, needs_every_member
from ..machine.drive_contents import RAID_MEMBER, Contents, Signature, plain_uuid
from ..machine.drives import Drive
from ..machine.unlabelled import PROBE, probes, written
from .drive_decisions import ADOPT, IGNORE, KEEP, REFUSE, TAKE, WIPE, Criteria, Decision, by_serial
from .drive_volumes import AnyVolume
from .md_arrays import Array, Superblock


@dataclass(frozen=True)
class Foreign:
    """An array over selected drives that is not ours: the facts that decide whether it can be adopted."""

    uuid: str
    """UUID as hexadecimal digits only: wipefs, mdadm and sysfs group them differently."""
    name: str
    level: str
    chunk_bytes: int
    raid_disks: int
    version: str = "1.2"


@dataclass(frozen=True)
class Consent:
    """What the owner allows beyond blank drives; by default nothing."""

    plan: bool = False
    """True: change nothing, and report what a plan would have to allow."""
    wipes: Mapping[str, str] = field(default_factory=dict)
    """Hashes by serial, from the applied plan."""
    hashes: Mapping[str, str] = field(default_factory=dict)
    """Hashes by kernel name, of the drives as they are now."""
    adopt: bool = False
    chunk_bytes: int = 0
    level: str = DEFAULT
    foreign: tuple[Foreign, ...] = ()
    disks_under: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Kernel names of the disks under each idle array."""
    mates: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By kernel name, the drives that carry members of the same array, assembled or not."""
    volumes: Mapping[str, AnyVolume] = field(default_factory=dict)
    """Several volumes of ours by the serials of their drives: one that carries what is its volume's is kept."""
    cut_off: Mapping[str, str] = field(default_factory=dict)
    """Arrays of ours whose creation was cut off, by plain UUID, with what to say of each: they may be wiped."""


def adopt(
    rows: list[Decision],
    signatures: Mapping[str, Sequence[Signature]],
    unreadable: Mapping[str, str],
    criteria: Criteria,
    consent: Consent,
) -> tuple[list[Decision], bool]:
    """Rows with the members of an array that fits except for its name, if there is exactly one such array."""
    if sum(row.verdict == TAKE for row in rows) == criteria.count and not consent.adopt:
        return rows, False  # blank drives suffice
    if any(row.verdict == KEEP for row in rows):
        return rows, False
    fitting = [array for array in consent.foreign if _fits(array, rows, signatures, unreadable, criteria, consent)]
    if len(fitting) != 1:
        return rows, False
    array = fitting[0]
    what = "member of array `%s` with level and chunk as asked" % array.name
    marked = []
    for row in rows:
        if row.verdict == IGNORE or not _is_member(signatures.get(row.drive.name, ()), array):
            marked.append(row)
        elif consent.adopt:
            marked.append(Decision(row.drive, ADOPT, what))
        elif consent.plan:
            marked.append(Decision(row.drive, ADOPT, what + "; needs `raid_array_adopt: true`"))
        else:
            marked.append(Decision(row.drive, REFUSE, "%s; %s" % (row.reason, what)))
    return marked, True


def _fits(
    array: Foreign,
    rows: list[Decision],
    signatures: Mapping[str, Sequence[Signature]],
    unreadable: Mapping[str, str],
    criteria: Criteria,
    consent: Consent,
) -> bool:
    members = [row.drive for row in rows if _is_member(signatures.get(row.drive.name, ()), array)]
    refused = {row.drive.name for row in rows if row.verdict == REFUSE}
    serials = {drive.serial for drive in members}
    return (
        bool(array.name)
        and array.version == "1.2"
        and array.level == consent.level
        and array.chunk_bytes == consent.chunk_bytes
        and array.raid_disks == len(members) == len(serials) == criteria.count
        and all(
            drive.name in refused
            and drive.name not in unreadable
            and drive.serial
            and not drive.partitions
            and not drive.metadata_bytes
            and len(signatures.get(drive.name, ())) == 1
            and len(drive.arrays) == (1 if drive.uses else 0)
            for drive in members
        )
    )


def is_foreign(array: Foreign, array_name: str, built: str | None) -> bool:
    """Whether an array is not ours: it has another name, or a level that we never make and is not what was built here.

    ``built`` is the UUID in the manifest. An unknown level says nothing.
    """
    if array.uuid == plain_uuid(built):
        return array.name != array_name
    return array.name != array_name or array.level not in ("", *LEVELS)


def _is_member(signatures: Sequence[Signature], array: Foreign) -> bool:
    return any(signature.type == RAID_MEMBER and plain_uuid(signature.uuid) == array.uuid for signature in signatures)


def array_mates(contents: Contents) -> dict[str, frozenset[str]]:
    """By kernel name, the drives that carry members of the same array as it, by their superblocks' UUIDs."""
    of_array: dict[str, set[str]] = {}
    for drive, signatures in contents.items():
        for signature in signatures:
            if signature.type == RAID_MEMBER and signature.uuid:
                of_array.setdefault(plain_uuid(signature.uuid), set()).add(drive)
    mates: dict[str, set[str]] = {}
    for drives in of_array.values():
        for drive in drives:
            mates.setdefault(drive, set()).update(drives)
    return {drive: frozenset(together) for drive, together in mates.items()}


def wipe(
    rows: list[Decision], holding: set[str], criteria: Criteria, consent: Consent, cut_off: Collection[str] = ()
) -> list[Decision]:
    """Rows with the drives to wipe: for a plan those that are needed, otherwise those that the applied plan names.

    Never more than the count needs, never a guess among several, and never to mend an array that lost a member. Beside
    volumes that are kept, only drives whose own array was ``cut_off`` while it was made: their kernel names.
    """
    kept = sum(row.verdict == KEEP for row in rows)
    needed = criteria.count - kept - sum(row.verdict == TAKE for row in rows)
    if needed <= 0 or (kept and not consent.volumes):
        return rows
    holding = holding & set(cut_off) if kept else holding
    if consent.plan:
        names = holding
    else:
        names = {row.drive.name for row in rows if row.drive.name in holding and row.drive.serial in consent.wipes}
    serials = {row.drive.name: row.drive.serial for row in rows}
    problems = _problems([row.drive for row in rows if row.drive.name in names], consent, serials)
    checked = []
    for row in rows:
        problem = problems.get(row.drive.name)
        if row.drive.name not in names:
            checked.append(row)
        elif problem:
            checked.append(Decision(row.drive, REFUSE, "%s; %s" % (row.reason, problem)))
        else:
            checked.append(Decision(row.drive, WIPE, row.reason))
    if sum(row.verdict == WIPE for row in checked) == needed:
        return checked
    # Too few or too many: wipe nothing, and keep the reason for each drive.
    return [
        Decision(row.drive, REFUSE, row.reason) if row.verdict == WIPE and row.drive.name in names else row
        for row in checked
    ]


def _problems(drives: Sequence[Drive], consent: Consent, serials: Mapping[str, str]) -> dict[str, str]:
    """Why named drives may not be wiped, by name. ``serials`` are those of all drives, by name.

    An array is wiped completely or not at all: a reason against one member holds for the others.
    """
    problems = {}
    for drive in drives:
        if consent.hashes.get(drive.name) is None:
            problems[drive.name] = "its contents could not be hashed"
        elif not consent.plan and consent.hashes[drive.name] != consent.wipes[drive.serial]:
            problems[drive.name] = "not what the plan saw: its contents changed since"
    while True:
        doomed = {drive.name for drive in drives} - set(problems)
        spared = {}
        for drive in drives:
            under = {other for array in drive.idle_arrays for other in consent.disks_under.get(array, ())}
            under |= consent.mates.get(drive.name, frozenset())
            strangers = sorted(under - doomed - {drive.name})
            if drive.name in doomed and strangers:
                spared[drive.name] = "its array has other members that may not be wiped: %s" % by_serial(
                    strangers, serials
                )
        if not spared:
            return problems
        problems.update(spared)


_WINDOW = 2**20
"""Bytes read where the data of the first member begins. A file system in the array would begin there."""


def cut_off(
    name: str,
    count: int,
    superblocks: Mapping[str, Superblock],
    arrays: Sequence[Array],
    known: str,
    level: str = DEFAULT,
    root: str = "/",
    unmade: str = "",
) -> dict[str, str]:
    """Arrays called ``name`` over ``count`` drives whose creation was cut off: what to say of each, by plain UUID.

    ``superblocks`` are those of all drives, by kernel name; ``known`` is the text of the manifest: what it names was
    built. An array whose first member is absent, or with anything in its data, is never among them, unless it is
    ``unmade``: the UUID of one whose making was noted and never ended. It never ran, so what is in its data was there
    before, such as the old array's that its drives were in.
    """
    found = {}
    for uuid in sorted({block.uuid for block in superblocks.values()}):
        blocks = [block for block in superblocks.values() if block.uuid == uuid]
        first = blocks[0]
        roles = [block.role for block in blocks]
        if (
            plain_uuid(uuid) not in plain_uuid(known)
            and {(block.name, block.level, block.raid_disks) for block in blocks} == {(name, level, count)}
            and needs_every_member(level)
            and len(blocks) < first.raid_disks
            and None not in roles
            and len(set(roles)) == len(roles)
            and not any(array.uuid == uuid and array.state not in ("inactive", "clear") for array in arrays)
            and (
                plain_uuid(uuid) == plain_uuid(unmade) or (0 in roles and all(_empty(block, root) for block in blocks))
            )
        ):
            found[plain_uuid(uuid)] = "making its array was cut off: %d of %d members were written, and no data" % (
                len(blocks),
                first.raid_disks,
            )
    return found


def _empty(member: Superblock, root: str) -> bool:
    """Whether nothing is found in this member's part of the array's data."""
    begin = member.data_offset_bytes
    if begin is None:
        return False
    try:
        handle = os.open(os.path.join(root, "dev", member.device), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # md writes to its members past their page cache, which may hold older data of an earlier reader.
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        places = [at for at in probes(os.lseek(handle, 0, os.SEEK_END)) if at >= begin + _WINDOW]
        blocks = [os.pread(handle, _WINDOW, begin), *(os.pread(handle, PROBE, at) for at in places)]
    except OSError:
        return False
    finally:
        os.close(handle)
    return all(blocks) and not any(map(written, blocks))
