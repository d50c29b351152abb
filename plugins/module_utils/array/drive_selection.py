"""Decides from facts which drives become members, with a reason for every drive."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Collection, Iterable, Mapping, Sequence

from ..common.raid_levels import BUILT_LEVELS
from ..machine.drive_contents import RAID_MEMBER, Signature, plain_uuid
from ..machine.drives import Drive
from ..machine.nvme_admin import Formats, mending
from .adopt_or_wipe import Consent, adopt, wipe
from .drive_decisions import ADOPT, IGNORE, KEEP, REFUSE, TAKE, WIPE, Criteria, Decision, shown_size
from .drive_volumes import AnyVolume

SIZE_TOLERANCE = 0.01
"""A "3.84 TB" drive has 3,840,755,982,336 bytes (IDEMA LBA1-03): within 1 % of its name, and so is its neighbour."""

PLAN_HINT = (
    "see the reason beside each drive; nothing was changed. Drives that may lose what they hold are named by a plan: "
    "`tunetool provision --plan plan.json`, read it, then `tunetool provision --apply plan.json`"
)
ADOPT_HINT = "`raid_array_adopt: true` keeps that array with its data; nothing was changed"


@dataclass(frozen=True)
class Selection:
    """The table, and either the members or the problem that stops the run."""

    decisions: tuple[Decision, ...]
    selected: tuple[Drive, ...]
    problem: str | None
    hint: str | None = None


def select(
    drives: Sequence[Drive],
    signatures: Mapping[str, Sequence[Signature]],
    criteria: Criteria,
    array_name: str,
    unreadable: Mapping[str, str] | None = None,
    consent: Consent | None = None,
    formats: Mapping[str, Formats] | None = None,
) -> Selection:
    """Decide about every drive.

    ``signatures`` maps a drive's kernel name to what lies on it and on its partitions; ``unreadable`` maps it to
    the error met when asking; ``formats`` to the LBA formats that it offers, for messages only. A drive of the array
    ``array_name`` (empty: none is) is kept, unless ``consent.foreign`` has that array; its members and chunk are for
    ``arrays.decide`` to compare. Without ``consent`` nothing that holds anything is ever chosen.
    """
    consent = consent or Consent()
    formats = formats or {}
    serial_counts = Counter(drive.serial for drive in drives)
    common = _common_block(drive for drive in drives if not _mismatch(drive, criteria))
    # Arrays of that name that are not ours, or were never finished.
    strangers = frozenset(array.uuid for array in consent.foreign if array.name == array_name) | set(consent.cut_off)
    rows = []
    holding, unfinished = set(), set()
    for drive in drives:
        mismatch = _mismatch(drive, criteria)
        if mismatch:
            rows.append(Decision(drive, IGNORE, mismatch))
            continue
        labels = signatures.get(drive.name, ())
        volume = consent.volumes.get(drive.serial)
        others = [signature for signature in labels if not _is_ours(signature, drive, volume or array_name, strangers)]
        ours = len(others) < len(labels)
        contents = _contents(drive, others, ours)
        begun = {plain_uuid(signature.uuid) for signature in others} & set(consent.cut_off)
        if contents and begun:
            contents = "; ".join([contents, *(consent.cut_off[uuid] for uuid in sorted(begun))])
            unfinished.add(drive.name)
        # Our own array may hold its member, and its file system may be mounted.
        fault = (unreadable or {}).get(drive.name) or _fault(drive, serial_counts, contents is None and ours)
        if fault is None and drive.metadata_bytes:
            mends = mending(drive.path, formats.get(drive.name), common or drive.lba_bytes)
            fault = "is formatted with %d metadata bytes per block: %s" % (drive.metadata_bytes, mends)
            fault = "%s; %s" % (contents, fault) if contents else fault
        if fault is None and drive.size_bytes == 0:
            fault = "has no capacity"
        if fault:
            rows.append(Decision(drive, REFUSE, fault))
        elif contents:
            holding.add(drive.name)
            rows.append(Decision(drive, REFUSE, contents))
        elif ours:
            what = "volume `%s`" % volume.name if volume else "member of our array `%s`" % array_name
            rows.append(Decision(drive, KEEP, what))
        else:
            rows.append(Decision(drive, TAKE, "blank"))
    rows, adoptable = adopt(rows, signatures, unreadable or {}, criteria, consent)
    if not adoptable:
        rows = wipe(rows, holding, criteria, consent, unfinished)
    rows = _spare_the_rest(rows, criteria)
    return _settle(rows, criteria, holding, adoptable and not consent.adopt, consent, formats)


def _mismatch(drive: Drive, criteria: Criteria) -> str | None:
    if criteria.serials and drive.serial not in criteria.serials:
        return "serial is not asked for"
    if criteria.model is not None and not fnmatchcase(drive.model, criteria.model):
        return "model is not `%s`" % criteria.model
    size = criteria.size_bytes
    if size is not None and not any(abs(drive_size - size) <= SIZE_TOLERANCE * size for drive_size in _sizes(drive)):
        return "size %s is not %s" % (shown_size(drive.size_bytes), shown_size(size))
    if criteria.transport is not None and drive.transport != criteria.transport:
        return "transport `%s` is not `%s`" % (drive.transport, criteria.transport)
    return None


def _sizes(drive: Drive) -> tuple[int, ...]:
    """The drive's size, and its size without metadata."""
    whole = drive.size_bytes * (drive.lba_bytes + drive.metadata_bytes) // drive.lba_bytes
    return (drive.size_bytes, whole)


def _fault(drive: Drive, serial_counts: Mapping[str, int], ours: bool) -> str | None:
    """Reasons against a drive that no plan can override."""
    if drive.claims and not ours:
        fault = "; ".join(drive.uses)
    elif not drive.serial:
        fault = "has no serial number"
    elif serial_counts[drive.serial] > 1:
        fault = (
            "serial `%s` is on %d drives, which may be paths to one: no NGUID, EUI-64 or address tells them apart"
            % (
                drive.serial,
                serial_counts[drive.serial],
            )
        )
    else:
        return None
    return fault


def _common_block(drives: Iterable[Drive]) -> int | None:
    """The logical block of most drives that have no metadata."""
    counted = Counter(drive.lba_bytes for drive in drives if not drive.metadata_bytes).most_common(1)
    return counted[0][0] if counted else None


def occupied(drive: Drive, labels: Sequence[Signature], unreadable: str | None = None) -> str | None:
    """Why a drive that is in no array of ours is not free: its users, what it holds, or why that is not known."""
    return unreadable or "; ".join(drive.claims) or _contents(drive, labels, ours=False)


def _contents(drive: Drive, others: Sequence[Signature], ours: bool) -> str | None:
    """The contents of an unused drive; ``others`` are its labels without our own array's."""
    held = [_where(signature, drive) for signature in others]
    # Report a label once that is on a drive many times, such as ZFS's.
    parts = ["holds " + ", ".join(dict.fromkeys(held))] if held else []
    if drive.partitions and not held:
        parts.append("has partitions " + ", ".join(drive.partitions))
    if drive.idle_arrays and not (ours and not drive.partitions):
        parts.append("; ".join(drive.uses))
    return "; ".join(parts) or None


def _is_ours(signature: Signature, drive: Drive, whose: AnyVolume | str, strangers: Collection[str]) -> bool:
    """``whose``: the drive's own volume of several, else the array's name."""
    if isinstance(whose, str):
        its = signature.type == RAID_MEMBER and _named(signature.label, whose)
    else:
        its = whose.carried_by(drive.name, signature)
    return its and plain_uuid(signature.uuid) not in strangers


def _named(label: str | None, array_name: str) -> bool:
    """md prefixes the name with the host that made the array: ``node1:nvme_raid0``."""
    return bool(array_name) and label is not None and label.split(":")[-1] == array_name


def _where(signature: Signature, drive: Drive) -> str:
    return str(signature) if signature.device == drive.name else "%s (on %s)" % (signature, signature.device)


def _spare_the_rest(rows: list[Decision], criteria: Criteria) -> list[Decision]:
    """When our array is complete, further blank drives of the same kind are spares, not members."""
    if sum(row.verdict in (KEEP, ADOPT) for row in rows) != criteria.count:
        return rows
    return [
        Decision(row.drive, IGNORE, "blank; the array is complete without it") if row.verdict == TAKE else row
        for row in rows
    ]


def _settle(
    rows: list[Decision],
    criteria: Criteria,
    holding: set[str],
    may_adopt: bool,
    consent: Consent,
    formats: Mapping[str, Formats],
) -> Selection:
    chosen = [row for row in rows if row.verdict in (TAKE, KEEP, WIPE, ADOPT)]
    problem, hint = None, None
    missing = sorted(set(criteria.serials) - {row.drive.serial for row in rows})
    if missing:
        problem = "serials not present: %s" % ", ".join("`%s`" % serial for serial in missing)
        hint = "check the slots, or correct `nvme_drives_serials`"
    elif len(chosen) < criteria.count:
        problem = "%d drives asked for, %d usable" % (criteria.count, len(chosen))
        hint = "see the reason beside each drive; nothing was changed"
        if not rows:
            hint = "this host has no NVMe drive: see `lsblk -d` there, or leave the host out; nothing was changed"
        elif consent.wipes:
            hint = "the plan does not allow what is missing, or is no longer true: make and read a new one"
        elif may_adopt:
            hint = ADOPT_HINT
        elif holding and not consent.plan:
            hint = PLAN_HINT
        elif len(holding) + len(chosen) > criteria.count:
            hint = "more drives hold data than are needed: name the wanted ones in `nvme_drives_serials`"
    elif len(chosen) > criteria.count:
        problem = "%d drives asked for, %d match" % (criteria.count, len(chosen))
        hint = "name the wanted ones in `nvme_drives_serials`, or narrow the model or size"
    else:
        problem, rows = _uneven(rows, chosen, formats)
        hint = (
            "%s needs equal members: see the reason beside each odd one; nothing was changed"
            % BUILT_LEVELS[consent.level]
        )
        hint = hint if problem else None
    if problem:
        # On a host that cannot be built, nothing is wiped.
        rows = [Decision(row.drive, REFUSE, row.reason) if row.verdict == WIPE else row for row in rows]
    return Selection(
        decisions=tuple(rows),
        selected=() if problem else tuple(row.drive for row in chosen),
        problem=problem,
        hint=hint,
    )


def _uneven(
    rows: list[Decision], chosen: list[Decision], formats: Mapping[str, Formats]
) -> tuple[str | None, list[Decision]]:
    """Members of unequal size or block size make a multi-zone or 4K array without an error from md."""
    size = Counter(row.drive.size_bytes for row in chosen).most_common(1)[0][0]
    block = _common_block(row.drive for row in chosen) or 0
    odd = {}
    for row in chosen:
        drive = row.drive
        if drive.lba_bytes != block:
            odd[drive.name] = "logical block of %d bytes, the others' have %d: %s" % (
                drive.lba_bytes,
                block,
                mending(drive.path, formats.get(drive.name), block),
            )
        elif drive.size_bytes != size:
            odd[drive.name] = "size %d bytes differs from the others' %d: `nvme_drives_size` can leave it out" % (
                drive.size_bytes,
                size,
            )
    if not odd:
        return None, rows
    marked = [Decision(row.drive, REFUSE, odd[row.drive.name]) if row.drive.name in odd else row for row in rows]
    serials = ", ".join("`%s`" % row.drive.serial for row in rows if row.drive.name in odd)
    return "the drives are not alike: %s" % serials, marked
