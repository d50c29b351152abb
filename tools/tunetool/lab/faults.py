"""Faults that a real node can have, injected one at a time; ``reset`` takes them away."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.lab import guest, node, ssh
from tunetool.lab.machine import Drive
from tunetool.lab.qmp import Qmp
from tunetool.lab.state import Fault, Lab, NodeState, data_serial

SLOW_BYTES_PER_SECOND = 20 * 10**6

KINDS = {
    "slow-drive": "the drive reads and writes at 20 MB/s",
    "remove-drive": "the drive is pulled out of its slot",
    "swap-drive": "the drive is replaced by a blank one of the same size with another serial",
    "mixed-size": "the drive is replaced by one of half the size with the same serial",
    "has-filesystem": "the drive carries an ext4 file system",
    "has-partitions": "the drive carries a partition table with one partition",
    "in-use": "the drive carries a mounted file system with a file in it",
}
_GUEST_SCRIPTS: dict[str, Callable[[str], str]] = {
    "has-filesystem": guest.has_filesystem,
    "has-partitions": guest.has_partitions,
    "in-use": guest.in_use,
}


def inject(lab: Lab, name: str, kind: str, serial: str | None, say: Callable[[str], None]) -> Fault:
    """Inject a fault and remember it. Without ``serial`` it meets the third data drive."""
    if kind not in KINDS:
        raise UsageProblem(f"`{kind}` is not a fault", f"choose one of {', '.join(KINDS)}")
    with lab.locked():
        found = lab.read(name)
        drive = found.drive(serial or default_serial(found))
        if drive.serial == found.system_serial:
            raise UsageProblem(
                f"`{drive.serial}` is the drive that is not for us", "choose a data drive: tunetool lab status"
            )
        if not node.alive(lab, name):
            raise CannotJudge(f"`{name}` does not run", f"tunetool lab reset {name}")
        say(f"{name}: {drive.serial}: {KINDS[kind]}")
        if kind in _GUEST_SCRIPTS:
            ssh.run(lab, found, _GUEST_SCRIPTS[kind](drive.serial))
        elif kind == "slow-drive":
            _slow(lab, found, drive)
        else:
            _replace(lab, found, drive, successor(drive, kind))
        fault = Fault(kind, drive.serial)
        found.faults.append(fault)
        lab.write(found)
    return fault


def after_reboot(found: NodeState) -> None:
    """What is left of the faults after a boot: a limit ends with its QEMU, a mount with its kernel."""
    after_save(found)
    found.faults = [
        replace(fault, kind="has-filesystem") if fault.kind == "in-use" else fault for fault in found.faults
    ]


def after_save(found: NodeState) -> None:
    """What is left of the faults in a saved state: all but a limit, which ends with its QEMU."""
    found.faults = [fault for fault in found.faults if fault.kind != "slow-drive"]


def default_serial(found: NodeState) -> str:
    """The third data drive, or the last one of a node with fewer."""
    first = data_serial(found.index, min(3, found.drive_count))
    # A drive that came back as another one has another letter and the same number.
    same = re.compile(f"^LAB{found.index}N[A-Z]{first.rpartition('V')[2]}$")
    return next((drive.serial for drive in found.drives if same.match(drive.serial)), first)


def successor(drive: Drive, kind: str) -> Drive | None:
    """The drive that comes into this one's slot, or None."""
    if kind == "mixed-size":
        return replace(drive, size=drive.size // 2)
    if kind == "swap-drive":
        serial = drive.serial + "R"
        return replace(drive, serial=serial, path=drive.path.with_name(drive.path.name.replace(drive.serial, serial)))
    return None


def _slow(lab: Lab, found: NodeState, drive: Drive) -> None:
    limits = dict.fromkeys(("bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr"), 0)
    with Qmp(lab.qmp_socket(found.name)) as qmp:
        qmp.command("block_set_io_throttle", {"id": drive.device_id, "bps": SLOW_BYTES_PER_SECOND, **limits})


def _replace(lab: Lab, found: NodeState, drive: Drive, new: Drive | None) -> None:
    with Qmp(lab.qmp_socket(found.name)) as qmp:
        node.detach(lab, found, qmp, [drive])
        drive.path.unlink()
        found.drives.remove(drive)
        lab.write(found)
        if new is None:
            return
        node.create_drive(new)
        node.attach(qmp, new)
        found.drives.append(new)
        found.drives.sort(key=lambda each: each.port)
        lab.write(found)
    ssh.run(lab, found, guest.wait_for_size(new.serial, new.size))
