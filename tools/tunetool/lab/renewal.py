"""Changes a node's data drives while it is off: other slots, or other drives, as in a cloud."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from tunetool.errors import UsageProblem
from tunetool.lab import node
from tunetool.lab.faults import OF_THE_DRIVE
from tunetool.lab.machine import Drive
from tunetool.lab.state import Fault, Lab, NodeState

_SERIAL = re.compile(r"^(?P<node>LAB\d+N)(?P<letter>[V-Z])(?P<number>\d+)$")
_LETTERS = "VWXYZ"


@dataclass(frozen=True)
class Change:
    """The changes to make."""

    shuffle: bool = False
    blank: bool = False
    new_serials: bool = False


NONE = Change()


def check(state: NodeState, change: Change) -> None:
    """Raises ``UsageProblem`` for a change that is not possible; called before the node is shut down."""
    if change.new_serials and not change.blank:
        raise UsageProblem("`--new-serials` means other drives, which are blank", "add `--blank-drives`")
    if change.shuffle and len(_data(state)) < 2:
        raise UsageProblem(f"`{state.name}` has no two data drives to shuffle", "tunetool lab status")


def apply(lab: Lab, state: NodeState, change: Change, say: Callable[[str], None]) -> None:
    """Change the drives of a node that is off, and record it."""
    if change.shuffle:
        say(f"{state.name}: moving every data drive to another slot")
        data = _data(state)
        # Each to the next slot, the same way every time, so that a test can be repeated.
        ports = [drive.port for drive in data]
        moved = [replace(drive, port=port) for drive, port in zip(data, ports[1:] + ports[:1], strict=True)]
        state.drives = sorted([*_system_drives(state), *moved], key=lambda drive: drive.port)
    if change.blank:
        say(f"{state.name}: blank data drives{', with new serial numbers' if change.new_serials else ''}")
        fresh = []
        for drive in _data(state):
            drive.path.unlink(missing_ok=True)
            serial = _next_serial(drive.serial) if change.new_serials else drive.serial
            path = drive.path.with_name(f"{serial}.img")
            fresh.append(replace(drive, serial=serial, path=path, bad_sectors=False))
            node.create_drive(fresh[-1])
            state.faults = [_renewed(fault, drive, serial) for fault in state.faults if _stays(fault, drive)]
        state.drives = [*_system_drives(state), *fresh]
    lab.write(state)


def _data(state: NodeState) -> list[Drive]:
    return [drive for drive in state.drives if drive.serial != state.system_serial]


def _system_drives(state: NodeState) -> list[Drive]:
    return [drive for drive in state.drives if drive.serial == state.system_serial]


def _next_serial(serial: str) -> str:
    match = _SERIAL.match(serial)
    if not match:
        raise UsageProblem(f"`{serial}` is not a serial of the lab", "tunetool lab status")
    letter = _LETTERS[(_LETTERS.index(match["letter"]) + 1) % len(_LETTERS)]
    return f"{match['node']}{letter}{match['number']}"


def _stays(fault: Fault, drive: Drive) -> bool:
    # The contents are lost with the drive; size, block size and shown serial stay.
    return fault.serial != drive.serial or fault.kind in OF_THE_DRIVE


def _renewed(fault: Fault, drive: Drive, serial: str) -> Fault:
    return replace(fault, serial=serial) if fault.serial == drive.serial else fault
