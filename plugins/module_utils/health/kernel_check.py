"""Whether the kernel's log tells of faults of this node's own drives, array and volume, and how often within a day.

What was found is kept for a day, since a fault that was logged once stays true: a check in fifteen minutes must not
take the node back. Lines within a minute of each other are one incident.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Iterable, Mapping, Sequence

from ..array.md_arrays import find, read_arrays
from ..common.check_result import FAIL, PASS, SKIP, UNKNOWN, Check
from ..common.manifest import each_volume
from ..machine.drive_identity import PCI_ADDRESS, controller_of
from ..machine.drives import Drive, read_drives
from ..machine.mounts import Mount, mount_at, read_mounts
from .kernel_faults import BY_ID, CHECKS, COUNTS, DRIVES, HUNG_TASK, Fault, concerns, fault_in
from .kernel_log import START, Line, Log, Position, Unreadable

DAY = 86400.0
TOGETHER = 60.0
"""Seconds from one line to the next of the same incident."""
_STACK = 60
"""Lines below a hung task's that may be its stack; and the seconds after which it is whole."""
_PROBED = "pci function "
"""nvme's first line of a controller: from it on, the name is perhaps another drive's."""
_SHOWN = 160


@dataclass(frozen=True)
class Ours:
    """What the log may call our drives, array and volume, and what it is called in words."""

    names: Mapping[str, str]
    serials: Sequence[str] = ()
    """Of the manifest's drives, also of one that is gone."""
    volumes: Sequence[str] = ()
    """The kernel's names of the volumes' devices."""
    only_xfs: bool = False
    only_array: bool = False


@dataclass(frozen=True)
class Incident:
    """Lines of one fault of one thing."""

    fault: str
    about: str
    first: float
    last: float
    lines: int
    text: str
    """The first line."""


@dataclass(frozen=True)
class State:
    """What one check leaves for the next."""

    position: Position = START
    boot: str = ""
    """The boot of the check, and of ``names``."""
    names: Mapping[str, str] = field(default_factory=dict)
    incidents: Sequence[Incident] = ()
    repaired: float = 0.0
    """What is older counts no more: a person has repaired it."""


def ours(manifest: Mapping[str, Any], root: str = "/") -> Ours:
    """What the manifest's drives, array and volume are called now."""
    names: dict[str, str] = {}
    below: dict[str, list[str]] = {}
    mounts, arrays, drives = read_mounts(root), read_arrays(root), read_drives(root)
    serials, volumes, running, mounted = [], [], [], []
    for name, volume in each_volume(manifest):
        array, of_it = volume["array"], " of volume %s" % name if name else ""
        members = [str(member["serial"]) for member in array["members"]] if array is not None else []
        serials += members
        for drive in drives:
            if drive.serial in members:
                label = "`%s`%s" % (drive.serial, of_it)
                names.update(dict.fromkeys((drive.name, drive.controller, drive.pci_address or ""), label))
                for port in _ports_above(root, drive):
                    below.setdefault(port, []).append(label)
        found = find(arrays, array["uuid"]) if array is not None else None
        mount = mount_at(volume["filesystem"]["mount_point"], mounts)
        running += [found] if found else []
        mounted += [mount.device_number] if mount else []
        device = found.device if found else _device(root, mount) if mount else ""
        if device:
            volumes.append(device)
            names.setdefault(device, "`%s`%s" % (device, of_it))
    for port, labels in below.items():
        names[port] = "port %s above %s" % (port, labels[0] if len(labels) == 1 else "%d drives" % len(labels))
    xfs = {each.device_number for each in mounts if each.fs_type == "xfs"}
    return Ours(
        names, serials, volumes, bool(xfs) and xfs <= set(mounted), bool(running) and len(running) == len(arrays)
    )


def _device(root: str, mount: Mount) -> str:
    """The kernel's name of the device of a mount: not that of a volume group. Empty without one."""
    link = os.path.join(root, "sys/dev/block", mount.device_number)
    if os.path.islink(link):
        return os.path.basename(os.path.realpath(link))
    return os.path.basename(mount.source) if mount.source.startswith("/dev/") else ""


def _ports_above(root: str, drive: Drive) -> list[str]:
    controller = os.path.realpath(controller_of(os.path.join(root, "sys/block", drive.name)))
    return [part for part in controller.split("/") if PCI_ADDRESS.match(part) and part != drive.pci_address]


def check_log(
    kept: Mapping[str, Any],
    manifest: Mapping[str, Any],
    now: float,
    log: Log,
    wanted: bool = True,
    built: float = 0.0,
) -> tuple[dict[str, Any], list[Check], list[Incident]]:
    """Read on from what an earlier check kept: what to keep now, the checks, and the incidents of a day.

    ``built``: when the manifest was written. Of a drive that no earlier check knew, what is older is no fault: it may
    be of the one that it replaced, or of the building.
    """
    if not wanted:
        return dict(kept), [Check(each, SKIP, EXPECTED, "`node_health_kernel_log` is false") for each in CHECKS], []
    state, here = _restored(kept), ours(manifest, log.root)
    try:
        lines, unread = log.since(state.position), ""
    except Unreadable as error:
        lines, unread = [], str(error)
    state = advance(state, lines, here, log.boot, now, built)
    note = "%d lines were overwritten before they could be read" % log.lost if log.lost else ""
    return asdict(state), judge(state.incidents, unread, note), list(state.incidents)


EXPECTED = "no fault of it in the kernel's log within a day"


def advance(state: State, lines: Sequence[Line], here: Ours, boot: str, now: float, built: float = 0.0) -> State:
    """The state after ``lines``, which follow its position in the log. ``built``: see ``check_log``."""
    known = set(state.names.values())
    lines, incidents = _whole(lines, now), [each for each in state.incidents if _counts(each, state.repaired, now)]
    # In an earlier boot, and before a drive was pulled, the names were those of the last check.
    same = state.boot == boot
    names_now = {**state.names, **here.names} if same else dict(here.names)
    current = dict(names_now if same else state.names)
    for index, line in enumerate(lines):
        if line.boot == boot and not same:
            current, same = dict(names_now), True
        controller, probed, _ = line.text.partition(": " + _PROBED)
        if probed:
            name = controller.rpartition(" ")[2]
            if name not in here.names:
                for gone in [each for each in current if each == name or each.startswith(name + "n")]:
                    names_now.pop(gone, None)
                    current.pop(gone)
        seen = _seen(line, lines[index + 1 : index + 1 + _STACK], current, here)
        if seen is None or (line.at < built and seen[1] not in known):
            continue
        if _counts(Incident("", "", line.at, line.at, 0, ""), state.repaired, now):
            _add(incidents, *seen, line)
    position = lines[-1].position if lines else state.position
    return State(
        position, boot, names_now, tuple(each for each in incidents if not _replaced(each, here)), state.repaired
    )


def _replaced(incident: Incident, here: Ours) -> bool:
    """Whether it is of a drive that the node is built of no more."""
    drives = re.findall("`([^`]+)`", incident.about) if BY_ID[incident.fault].check == DRIVES else []
    return not set(drives) <= set(here.serials)


def _whole(lines: Sequence[Line], now: float) -> Sequence[Line]:
    """Without a hung task whose stack may not be all there yet, and what follows it: the next check reads that."""
    for index in range(len(lines) - 1, max(-1, len(lines) - 1 - _STACK), -1):
        if HUNG_TASK.pattern.search(lines[index].text):
            ended = any("</TASK>" in line.text for line in lines[index + 1 :])
            return lines if ended or not 0 <= now - lines[index].at < _STACK else lines[:index]
    return lines


def _seen(line: Line, after: Sequence[Line], names: Mapping[str, str], here: Ours) -> tuple[Fault, str] | None:
    """The fault of ours that a line tells of, and what it is about in words."""
    hung = HUNG_TASK.pattern.search(line.text)
    if hung:
        stack = [hung["name"]]
        for each in after:
            if HUNG_TASK.pattern.search(each.text):
                break
            stack.append(each.text)
            if "</TASK>" in each.text:
                break
        lines, ours_now = "\n".join(stack), [volume for volume in here.volumes if volume in names]
        named = [volume for volume in ours_now if concerns(lines, volume, only_xfs=False, only_array=False)]
        if not named and ours_now and concerns(lines, "", here.only_xfs, here.only_array):
            named = ours_now
        return (HUNG_TASK, " or ".join(names[volume] for volume in named)) if named else None
    found = fault_in(line.text)
    if found is None or found[1] not in names:
        return None
    return found[0], names[found[1]]


def _add(incidents: list[Incident], fault: Fault, about: str, line: Line) -> None:
    for index in range(len(incidents) - 1, -1, -1):
        each = incidents[index]
        if (each.fault, each.about) == (fault.id, about):
            if abs(line.at - each.last) < TOGETHER:
                incidents[index] = replace(each, last=max(each.last, line.at), lines=each.lines + 1)
                return
            break
    incidents.append(Incident(fault.id, about, line.at, line.at, 1, line.text[:_SHOWN]))


def _counts(incident: Incident, repaired: float, now: float) -> bool:
    return incident.last > repaired and now - incident.last < DAY


def judge(incidents: Iterable[Incident], unread: str = "", note: str = "") -> list[Check]:
    """The checks over the incidents of a day. ``unread``: why the log could not be read."""
    groups: dict[tuple[str, str], list[Incident]] = {}
    for each in incidents:
        groups.setdefault((each.fault, each.about), []).append(each)
    return [_judged(identity, groups, unread, note) for identity in CHECKS]


def _judged(identity: str, groups: Mapping[tuple[str, str], Sequence[Incident]], unread: str, note: str) -> Check:
    failed, told, remedies = [], [], []
    for (kind, about), seen in groups.items():
        fault = BY_ID[kind]
        if fault.check != identity:
            continue
        often = "" if len(seen) == 1 else " (%d times within a day)" % len(seen)
        words = "%s: %s%s" % (about, fault.means, often)
        if fault.fails_at and len(seen) >= fault.fails_at:
            failed.append("%s; the kernel: `%s`" % (words, seen[-1].text))
            remedies.append(fault.remedy)
        elif fault.fails_at != COUNTS:
            told.append("%s; %d times within a day fail" % (words, fault.fails_at))
        else:
            told.append(words)
    if failed:
        remedy = "; ".join(dict.fromkeys(remedies)) + "; then `tunetool-health repaired` on the node"
        return Check(identity, FAIL, EXPECTED, "; ".join([*failed, *told]), remedy)
    if unread:
        return Check(identity, UNKNOWN, EXPECTED, "; ".join([unread, *told]), "see `journalctl -k`")
    return Check(identity, PASS, EXPECTED, "; ".join([*told, *([note] if note else [])]) or "none")


def repaired(kept: Mapping[str, Any], now: float | None = None) -> dict[str, Any]:
    """What to keep after a person has repaired what was found until now."""
    return asdict(replace(_restored(kept), incidents=(), repaired=time.time() if now is None else now))


def _restored(kept: Mapping[str, Any]) -> State:
    """What a file has. One that somebody edited is none."""
    try:
        return State(
            Position(**kept["position"]),
            str(kept["boot"]),
            {str(name): str(label) for name, label in dict(kept["names"]).items()},
            tuple(Incident(**each) for each in kept["incidents"] if each["fault"] in BY_ID),
            float(kept["repaired"]),
        )
    except (KeyError, TypeError, ValueError):
        return State(names={})
