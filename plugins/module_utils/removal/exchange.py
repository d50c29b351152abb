"""Exchanging a member of an array that has its data a second time: nothing is lost, and the volume stays mounted.

``plan_exchange`` decides, pure. ``carry_out`` acts; each step is left out where an interrupted run has made it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Mapping, Sequence

from ..array.adopt_or_wipe import Consent
from ..array.create import refuse_unless_blank
from ..array.drive_decisions import IGNORE, KEEP, REFUSE, TAKE, WIPE, Decision
from ..array.drive_selection import select
from ..array.md_arrays import Array, find, read_arrays
from ..common.commands import CommandError, run
from ..common.drift import Ledger
from ..common.manifest import MANIFEST_PATH, dump, write
from ..common.raid_levels import LEVELS
from ..common.refusal import Refusal
from ..common.waiting import try_for, wait_for
from ..machine.drive_contents import plain_uuid
from ..machine.drives import Drive, disks_under, read_drives
from ..machine.held_drives import held
from ..plan.plan_file import drive_part
from .decision import Machine
from .replacement import Swap, held_text, wrong_serials
from .wipe_drives import refuse_unless_wipeable, unwatched, wipe

SLOT_SECONDS = 60.0
"""md gives a drive that was added its slot within a second or two."""


@dataclass(frozen=True)
class Exchange:
    """What is to be done with the array's members. With ``problems``: nothing."""

    decisions: tuple[Decision, ...]
    array: Array | None = None
    old: Drive | None = None
    """The member that leaves, if it is still on the node with the array's label."""
    new: Drive | None = None
    """The drive that comes; None once it is a member."""
    serials: tuple[str, ...] = ()
    """The members by slot afterwards, as far as it is known before."""
    leaving: str = ""
    """The old member's serial."""
    hashes: Mapping[str, str] | None = None
    """By serial, of a new drive that holds something."""
    problems: tuple[str, ...] = ()
    note: str = ""


def plan_exchange(machine: Machine, swap: Swap) -> Exchange | None:
    """What an exchange does; None where the level keeps nothing, and the volume has to be built anew."""
    if machine.manifest is None or machine.volumes or not LEVELS[machine.level].redundant:
        return None
    built = machine.manifest["array"]
    array = find(machine.arrays, built["uuid"])
    rows = tuple(Decision(drive, IGNORE, "not a member") for drive in machine.drives)
    # Of one that is whole and refuses writes, md takes a member out, and adds none.
    if array is None or array.fault is not None:
        fault = (array.fault if array else None) or (
            "array `%s` is not assembled: put its members back and reboot; `tunetool provision` assembles it"
            % built["name"]
        )
        text, _, cure = fault.partition(": ")
        return Exchange(rows, problems=("%s. hint: nothing was changed; %s" % (text, cure),))
    known = {drive.name: drive for drive in machine.drives}
    running = [known[name].serial for name in array.members if name in known]
    serials = tuple(member["serial"] for member in built["members"])
    # Where the manifest has both, somebody names two members.
    there = swap.new in running and not {swap.old, swap.new} <= set(serials)
    problems = [] if there else wrong_serials(serials, swap)
    old = next((drive for drive in machine.drives if drive.serial == swap.old), None)
    if old is not None and not (old.name in array.members or _has_its_label(old, machine, array)):
        old = None
    if there and old is not None and old.name in array.members:
        problems.append(
            "`%s` is a member already, and came for another one than `%s`. hint: nothing was changed; name the drive "
            "that came for `%s`" % (swap.new, swap.old, swap.old)
        )
    elif old is not None and old.name in array.members and not array.survives(old.name):
        problems.append(
            "`%s` holds the only copy of some of the data. hint: nothing was changed; put back what is missing, or "
            "wait for the rebuild to end" % swap.old
        )
    wanted = tuple(swap.new if serial == swap.old else serial for serial in serials)
    new = next((drive for drive in machine.drives if drive.serial == swap.new), None)
    rows, holding, problem = _rules(machine, swap, array, [*running, swap.new], there)
    if problem and not problems:
        problems = [problem]
    if there and old is None and swap.old not in serials:
        note = "`%s` is no longer a member, `%s` is one" % (swap.old, swap.new)
        return Exchange(rows, array, serials=serials, note="nothing to replace: %s" % note)
    return Exchange(
        rows,
        array,
        old,
        None if there else new,
        wanted,
        swap.old,
        {swap.new: swap.hashes[holding.name]} if holding is not None and holding.name in swap.hashes else None,
        tuple(problems),
        "array `%s` keeps its data and stays mounted; `%s` is filled from the other members"
        % (built["name"], swap.new),
    )


def _has_its_label(drive: Drive, machine: Machine, array: Array) -> bool:
    """Whether it is a member that left: the label of another array is somebody's data."""
    block = machine.superblocks.get(drive.name)
    return block is not None and plain_uuid(block.uuid) == plain_uuid(array.uuid)


def _rules(
    machine: Machine, swap: Swap, array: Array, serials: Sequence[str], there: bool
) -> tuple[tuple[Decision, ...], Drive | None, str | None]:
    """Rows by the rules of provisioning, the new drive if it holds something, and why it cannot come."""
    new = [drive for drive in machine.drives if drive.serial == swap.new]
    holding = [drive for drive in new if not there and (machine.signatures.get(drive.name) or drive.partitions)]
    stay = sorted({serial for serial in serials if serial != swap.old})
    after = [
        replace(drive, uses=(), arrays=(), idle_arrays=(), partitions=())
        if drive.name in array.members or (drive in holding and not drive.claims)
        else drive
        for drive in machine.drives
    ]
    criteria = replace(swap.criteria, serials=tuple(stay), count=len(stay))
    selection = select(after, {}, criteria, str(array.name), machine.unreadable, Consent(level=machine.level))
    ruled = {row.drive.name: row for row in selection.decisions if row.drive.serial in stay}
    rows = []
    for drive in machine.drives:
        rule = ruled.get(drive.name)
        if drive.serial == swap.old:
            rows.append(Decision(drive, IGNORE, "leaves the array"))
        elif rule is None:
            rows.append(Decision(drive, IGNORE, "not a member"))
        elif rule.verdict != TAKE:
            rows.append(Decision(drive, REFUSE, rule.reason))
        elif drive in holding:
            rows.append(Decision(drive, WIPE, held_text(drive, machine)))
        elif drive in new and not there:
            rows.append(Decision(drive, TAKE, "blank, comes for `%s`" % swap.old))
        else:
            rows.append(Decision(drive, KEEP, "member of `%s`, keeps its data" % array.name))
    problem = "%s, so it cannot become a member" % selection.problem if selection.problem else None
    if not problem and holding and holding[0].name not in swap.hashes:
        problem = "drive `%s` cannot be hashed" % swap.new
    return tuple(rows), holding[0] if holding else None, problem


def exchange_part(exchange: Exchange, text: str) -> dict[str, Any]:
    """One host's part of a plan: nothing of the volume is lost, at most what the new drive holds."""
    action = "refuse" if exchange.problems else "nothing"
    hashes = exchange.hashes or {}
    drives = []
    for row in exchange.decisions:
        wiped = row.verdict == WIPE and not exchange.problems
        verdict = REFUSE if row.verdict == WIPE and not wiped else row.verdict
        drives.append(drive_part(row, verdict, (), hashes.get(row.drive.serial) if wiped else None))
    return {"drives": drives, "array_action": action, "array_reason": text}


def carry_out(exchange: Exchange, manifest: Mapping[str, Any], allowed: Mapping[str, str], ledger: Ledger) -> list[str]:
    """Exchange the member, and write the manifest. Returns the members' serials by slot."""
    array, old, new = exchange.array, exchange.old, exchange.new
    if array is None:
        return list(exchange.serials)
    leaves = "member `%s`\n" % old.serial if old is not None else ""
    comes = "member `%s`\n" % new.serial if new is not None else ""
    acting = ledger.note("array %s" % array.name, leaves, comes) if leaves or comes else ledger.acting
    if not acting:
        return list(exchange.serials)
    if new is not None:
        with held([new]):
            if exchange.hashes:
                refuse_unless_wipeable([new], allowed)
                wipe([new])
            refuse_unless_blank([new], deep=True)
            if old is not None:
                _leave(array, old, ledger)
            run(["mdadm", "--manage", array.path, "--add", new.path])
    elif old is not None:
        _leave(array, old, ledger)
    return _remember(exchange, array, manifest, ledger)


def _leave(array: Array, old: Drive, ledger: Ledger) -> None:
    """Take the old drive out, and its label from it: what udev finds on it must not bring it back. Raises ``Refusal``
    where others went since."""
    now = find(read_arrays(), array.uuid)
    if now is None or now.fault is not None or not now.survives(old.name):
        fault = now.fault if now is not None else None
        why = fault or "`%s` holds the only copy of some of the data by now" % old.serial
        raise Refusal("%s. hint: nothing was changed" % why)
    with held([old]), unwatched([old.name]):
        if old.name in now.members:
            run(["mdadm", "--manage", array.path, "--fail", old.path])
        # One that md has failed has no slot, and is held all the same.
        if old.name in disks_under("/", now.device):
            # Until its last request has ended.
            try_for(lambda: run(["mdadm", "--manage", array.path, "--remove", old.path]), CommandError, 30.0, 0.5)
        try:
            run(["mdadm", "--zero-superblock", old.path])
        except CommandError as error:
            # At its end of life a drive takes no writes. md never takes it back by itself: its label is out of date.
            ledger.warnings.append("`%s` keeps its label: %s. hint: pull it" % (old.serial, error))


def _remember(exchange: Exchange, array: Array, manifest: Mapping[str, Any], ledger: Ledger) -> list[str]:
    new = exchange.new.name if exchange.new is not None else None

    def placed() -> Array | None:
        now = find(read_arrays(), array.uuid)
        return now if now is not None and (new is None or new in now.members) else None

    now = wait_for(placed, SLOT_SECONDS)
    if now is None:
        raise Refusal("`%s` was added and has no slot. hint: see `mdadm --detail %s` and `dmesg`" % (new, array.path))
    document = with_slots(manifest, now, read_drives(), exchange.leaving)
    before, after = ([member["serial"] for member in each["array"]["members"]] for each in (manifest, document))
    # `tunetool provision` may name the same ones in another order.
    if sorted(before) != sorted(after):
        ledger.note(MANIFEST_PATH, dump(manifest), dump(document))
        write(document)
    return after


def with_slots(manifest: Mapping[str, Any], array: Array, drives: Sequence[Drive], leaving: str) -> dict[str, Any]:
    """The manifest with the array's members as they are now. Others that are absent have the slots that are empty:
    md fills its first empty one, whichever drive it was that left."""
    known = {drive.name: drive.member for drive in drives}
    present = [known.get(name or "") for name in array.members]
    serials = {member["serial"] for member in present if member}
    absent = [member for member in manifest["array"]["members"] if member["serial"] not in {*serials, leaving}]
    rows = [member or absent.pop(0) for member in present if member or absent]
    return dict(manifest, array=dict(manifest["array"], members=rows))
