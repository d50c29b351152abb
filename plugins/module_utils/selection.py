"""Which drives become members: decided from facts alone, with a reason for every drive."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Mapping, Sequence

from .contents import RAID_MEMBER, Signature
from .drives import Drive
from .units import format_size, format_size_binary

SIZE_TOLERANCE = 0.01
"""A "3.84 TB" drive has 3,840,755,982,336 bytes (IDEMA LBA1-03): within 1 % of its name, and so is its neighbour."""

TAKE, KEEP, REFUSE, IGNORE = "take", "keep", "refuse", "ignore"


@dataclass(frozen=True)
class Criteria:
    """What the owner asks for. ``serials`` and the rest may be combined; all that is given must hold."""

    count: int
    model: str | None = None
    """Glob over the model string, case-sensitive: ``SAMSUNG MZWLO3T8*``."""
    size_bytes: int | None = None
    transport: str | None = None
    serials: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """One drive's row in the table."""

    drive: Drive
    verdict: str
    """take (blank), keep (member of our own array), refuse (asked for, but not safe), ignore (not asked for)."""
    reason: str


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
) -> Selection:
    """Decide about every drive.

    ``signatures`` maps a drive's kernel name to what lies on it and on its partitions; ``unreadable`` maps it to
    the error met when asking. A drive of the array ``array_name`` is kept; its level, members and chunk are for
    ``arrays.decide`` to compare.
    """
    serial_counts = Counter(drive.serial for drive in drives)
    rows = []
    for drive in drives:
        mismatch = _mismatch(drive, criteria)
        if mismatch:
            rows.append(Decision(drive, IGNORE, mismatch))
            continue
        danger = (unreadable or {}).get(drive.name) or _danger(
            drive, signatures.get(drive.name, ()), serial_counts, array_name
        )
        if danger:
            rows.append(Decision(drive, REFUSE, danger))
        elif _own(signatures.get(drive.name, ()), array_name):
            rows.append(Decision(drive, KEEP, "member of our array `%s`" % array_name))
        else:
            rows.append(Decision(drive, TAKE, "blank"))
    rows = _spare_the_rest(rows, criteria)
    return _settle(rows, criteria)


def _mismatch(drive: Drive, criteria: Criteria) -> str | None:
    if criteria.serials and drive.serial not in criteria.serials:
        return "serial is not asked for"
    if criteria.model is not None and not fnmatchcase(drive.model, criteria.model):
        return "model is not `%s`" % criteria.model
    size = criteria.size_bytes
    if size is not None and abs(drive.size_bytes - size) > SIZE_TOLERANCE * size:
        return "size %s is not %s" % (_size(drive.size_bytes), _size(size))
    if criteria.transport is not None and drive.transport != criteria.transport:
        return "transport `%s` is not `%s`" % (drive.transport, criteria.transport)
    return None


def _danger(
    drive: Drive, signatures: Sequence[Signature], serial_counts: Mapping[str, int], array_name: str
) -> str | None:
    own = _own(signatures, array_name)
    # Our own array may hold its member, and its file system may be mounted: that is what it was built for.
    uses = () if own and not drive.partitions else drive.uses
    foreign = [
        signature
        for signature in signatures
        if not (signature.type == RAID_MEMBER and _named(signature.label, array_name))
    ]
    if uses:
        danger = "; ".join(uses)
    elif not drive.serial:
        danger = "has no serial number"
    elif serial_counts[drive.serial] > 1:
        danger = "serial `%s` is on %d drives" % (drive.serial, serial_counts[drive.serial])
    elif foreign:
        danger = "holds " + ", ".join(_where(signature, drive) for signature in foreign)
    elif drive.partitions:
        danger = "has partitions " + ", ".join(drive.partitions)
    elif drive.metadata_bytes:
        danger = "is formatted with %d metadata bytes per block" % drive.metadata_bytes
    elif drive.size_bytes == 0:
        danger = "has no capacity"
    else:
        return None
    return danger


def _own(signatures: Sequence[Signature], array_name: str) -> bool:
    return any(signature.type == RAID_MEMBER and _named(signature.label, array_name) for signature in signatures)


def _named(label: str | None, array_name: str) -> bool:
    """md prefixes the name with the host that made the array: ``node1:nvme_raid0``."""
    return label is not None and label.split(":")[-1] == array_name


def _where(signature: Signature, drive: Drive) -> str:
    return str(signature) if signature.device == drive.name else "%s (on %s)" % (signature, signature.device)


def _spare_the_rest(rows: list[Decision], criteria: Criteria) -> list[Decision]:
    """When our array is complete, further blank drives of the same kind are spares, not members."""
    if sum(row.verdict == KEEP for row in rows) != criteria.count:
        return rows
    return [
        Decision(row.drive, IGNORE, "blank; the array is complete without it") if row.verdict == TAKE else row
        for row in rows
    ]


def _settle(rows: list[Decision], criteria: Criteria) -> Selection:
    chosen = [row for row in rows if row.verdict in (TAKE, KEEP)]
    problem, hint = None, None
    missing = sorted(set(criteria.serials) - {row.drive.serial for row in rows})
    if missing:
        problem = "serials not present: %s" % ", ".join("`%s`" % serial for serial in missing)
        hint = "check the slots, or correct `nvme_drives_serials`"
    elif len(chosen) < criteria.count:
        problem = "%d drives asked for, %d usable" % (criteria.count, len(chosen))
        hint = "see the reason beside each drive; nothing was changed"
    elif len(chosen) > criteria.count:
        problem = "%d drives asked for, %d match" % (criteria.count, len(chosen))
        hint = "name the wanted ones in `nvme_drives_serials`, or narrow the model or size"
    else:
        problem, rows = _uneven(rows, chosen)
        hint = "RAID0 needs equal members; `nvme_drives_size` can leave the odd one out" if problem else None
    return Selection(
        decisions=tuple(rows),
        selected=() if problem else tuple(row.drive for row in chosen),
        problem=problem,
        hint=hint,
    )


def _uneven(rows: list[Decision], chosen: list[Decision]) -> tuple[str | None, list[Decision]]:
    """Members of unequal size or block size make a multi-zone or 4K array without an error from md."""
    size = Counter(row.drive.size_bytes for row in chosen).most_common(1)[0][0]
    block = Counter(row.drive.lba_bytes for row in chosen).most_common(1)[0][0]
    odd = {}
    for row in chosen:
        drive = row.drive
        if drive.size_bytes != size:
            odd[drive.name] = "size %d bytes differs from the others' %d" % (drive.size_bytes, size)
        elif drive.lba_bytes != block:
            odd[drive.name] = "logical block %d differs from the others' %d: `nvme format --lbaf` mends it" % (
                drive.lba_bytes,
                block,
            )
    if not odd:
        return None, rows
    marked = [Decision(row.drive, REFUSE, odd[row.drive.name]) if row.drive.name in odd else row for row in rows]
    serials = ", ".join("`%s`" % row.drive.serial for row in rows if row.drive.name in odd)
    return "the drives are not alike: %s" % serials, marked


def _size(count: int) -> str:
    """Decimal as drives are sold, unless the binary figure is the round one."""
    return format_size_binary(count) if count % 2**30 == 0 else format_size(count)


def table(decisions: Sequence[Decision]) -> str:
    """The rows as fixed-width text, one drive a line."""
    header = ("drive", "serial", "model", "size", "verdict", "reason")
    lines = [header] + [
        (
            row.drive.name,
            row.drive.serial or "(none)",
            row.drive.model,
            _size(row.drive.size_bytes),
            row.verdict,
            row.reason,
        )
        for row in decisions
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header) - 1)]
    return "\n".join(
        "  ".join([cell.ljust(width) for cell, width in zip(line, widths)] + [line[-1]]).rstrip() for line in lines
    )
