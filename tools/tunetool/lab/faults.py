"""Faults that a real node can have, injected one at a time; ``reset`` removes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.lab import foreign_contents, guest, node, ssh
from tunetool.lab.machine import Drive
from tunetool.lab.qemu import Qmp
from tunetool.lab.state import Fault, Lab, NodeState, data_serial

SLOW_BYTES_PER_SECOND = 20 * 10**6

KINDS = {
    "slow-drive": "the drive reads and writes at 20 MB/s",
    "io-errors": "one sector in 8 MiB of the drive can be neither read nor written",
    "remove-drive": "the drive is pulled out of its slot",
    "extra-drive": "one more blank drive is plugged in",
    "swap-drive": "the drive is replaced by a blank one of the same size with another serial",
    "mixed-size": "the drive is replaced by one of half the size with the same serial",
    "4k-sectors": "the drive is replaced by one with blocks of 4096 bytes and the same serial",
    "duplicate-serial": "the drive is replaced by one that shows another data drive's serial",
    "empty-serial": "the drive is replaced by one that shows no serial",
    "metadata": "the drive is formatted with 8 bytes of metadata per block",
    "has-filesystem": "the drive carries an ext4 file system",
    "has-partitions": "the drive carries a partition table with one partition",
    "in-use": "the drive carries a mounted file system with a file in it",
    "partition-in-use": "the drive carries a partition with a mounted file system",
    "btrfs": "the drive carries a btrfs file system",
    "btrfs-in-use": "the drive carries a mounted btrfs file system",
    "lvm": "the drive carries an active logical volume",
    "lvm-idle": "the drive carries a logical volume that is not active",
    "luks": "the drive carries a LUKS header",
    "swap-signature": "the drive carries a swap area",
    "zfs-label": "the drive carries the labels of a ZFS pool",
}
GUEST_SCRIPTS: dict[str, Callable[[str], str]] = {
    "metadata": foreign_contents.metadata,
    "has-filesystem": foreign_contents.has_filesystem,
    "has-partitions": foreign_contents.has_partitions,
    "in-use": foreign_contents.in_use,
    "partition-in-use": foreign_contents.partition_in_use,
    "btrfs": foreign_contents.btrfs,
    "btrfs-in-use": foreign_contents.btrfs_in_use,
    "lvm": foreign_contents.lvm,
    "lvm-idle": foreign_contents.lvm_idle,
    "luks": foreign_contents.luks,
    "swap-signature": foreign_contents.swap_signature,
    "zfs-label": foreign_contents.zfs_label,
}
OF_THE_DRIVE = ("extra-drive", "mixed-size", "4k-sectors", "duplicate-serial", "empty-serial")
"""Faults of the drive itself, which stay when the drive is blank again."""

_AFTER_BOOT = {"in-use": "has-filesystem", "partition-in-use": "has-partitions", "btrfs-in-use": "btrfs"}
_END_WITH_QEMU = ("slow-drive", "metadata")


def inject(
    lab: Lab,
    name: str,
    kind: str,
    serial: str | None,
    say: Callable[[str], None],
    pulled: Callable[[NodeState, Callable[[], None]], None],
) -> Fault:
    """Inject a fault and record it in the node's state. Default of ``serial``: the third data drive.

    ``pulled`` carries out what pulls a drive.
    """
    if kind not in KINDS:
        raise UsageProblem(f"`{kind}` is not a fault", f"choose one of {', '.join(KINDS)}")
    with lab.locked():
        state = lab.read(name)
        if kind == "extra-drive" and serial:
            raise UsageProblem("`extra-drive` adds a drive of its own", "leave `--drive` out")
        drive = extra_drive(state) if kind == "extra-drive" else state.drive(serial or default_serial(state))
        if drive.serial == state.system_serial:
            raise UsageProblem(
                f"`{drive.serial}` is the system drive, which no fault may touch",
                "choose a data drive: tunetool lab status",
            )
        new_drive = replacement(state, drive, kind)
        if not node.alive(lab, name):
            raise CannotJudge(f"`{name}` does not run", f"tunetool lab reset {name}")
        say(f"{name}: {drive.serial}: {KINDS[kind]}")
        if kind in GUEST_SCRIPTS:
            ssh.run(lab, state, GUEST_SCRIPTS[kind](drive.serial))
        elif kind == "slow-drive":
            _slow(lab, state, drive)
        elif kind == "io-errors":
            _go_bad(lab, state, drive)
        else:
            if kind != "extra-drive":
                pulled(state, lambda: _pull(lab, state, drive))
            if new_drive:
                _plug(lab, state, new_drive)
        fault = Fault(kind, drive.serial)
        state.faults.append(fault)
        lab.write(state)
    return fault


def extra_drive(state: NodeState) -> Drive:
    """Plug one more data drive of the same size into the first free slot."""
    taken = {drive.port for drive in state.drives}
    free = [port for port in range(state.ports) if port not in taken]
    names = {drive.serial for drive in state.drives}
    number = next(n for n in range(state.drive_count + 1, state.ports + 2) if data_serial(state.index, n) not in names)
    if not free:
        raise UsageProblem(f"`{state.name}` has no free slot", f"tunetool lab reset {state.name}")
    serial = data_serial(state.index, number)
    path = state.drives[0].path.with_name(f"{serial}.img")
    return Drive(serial, path, state.drive_size, free[0])


def replacement(state: NodeState, drive: Drive, kind: str) -> Drive | None:
    """The drive that replaces this one in its slot; None if the fault keeps the drive."""
    serial = drive.serial + "R"
    drive = replace(drive, bad_sectors=False)
    path = drive.path.with_name(drive.path.name.replace(drive.serial, serial))
    known = {
        "extra-drive": drive,
        "mixed-size": replace(drive, size=drive.size // 2),
        "swap-drive": replace(drive, serial=serial, path=path),
        "4k-sectors": replace(drive, block=4096),
        "empty-serial": replace(drive, says=""),
    }
    if kind != "duplicate-serial":
        return known.get(kind)
    not_these = (drive.serial, state.system_serial)
    donors = [donor for donor in state.drives if donor.serial not in not_these and donor.says is None]
    if not donors or any(donor.says for donor in state.drives):
        raise UsageProblem(
            f"`{drive.serial}` cannot show another's serial",
            "one drive of a node with at least two data drives can",
        )
    return replace(drive, says=donors[0].serial)


def after_reboot(state: NodeState) -> None:
    """The faults that remain after a boot: a speed limit ends with its QEMU, a mount with its kernel."""
    after_save(state)
    state.faults = [replace(fault, kind=_AFTER_BOOT.get(fault.kind, fault.kind)) for fault in state.faults]


def after_save(state: NodeState) -> None:
    """The faults that a saved state keeps: all but those that end with its QEMU."""
    state.faults = [fault for fault in state.faults if fault.kind not in _END_WITH_QEMU]


def default_serial(state: NodeState) -> str:
    """The third data drive, or the last one of a node with fewer."""
    first = data_serial(state.index, min(3, state.drive_count))
    # A drive that was replaced has another letter and the same number in its serial.
    same = re.compile(f"^LAB{state.index}N[A-Z]{first.rpartition('V')[2]}$")
    return next((drive.serial for drive in state.drives if same.match(drive.serial)), first)


def _slow(lab: Lab, state: NodeState, drive: Drive) -> None:
    limits = dict.fromkeys(("bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr"), 0)
    with Qmp(lab.qmp_socket(state.name)) as qmp:
        qmp.command("block_set_io_throttle", {"id": drive.device_id, "bps": SLOW_BYTES_PER_SECOND, **limits})


def _go_bad(lab: Lab, state: NodeState, drive: Drive) -> None:
    if drive.bad_sectors:
        raise UsageProblem(f"`{drive.serial}` has bad sectors already", "choose another drive: tunetool lab status")
    layer, reopened = drive.going_bad()
    with Qmp(lab.qmp_socket(state.name)) as qmp:
        qmp.command("blockdev-add", layer)
        qmp.command("blockdev-reopen", {"options": [reopened]})
    state.drives[state.drives.index(drive)] = replace(drive, bad_sectors=True)


def _pull(lab: Lab, state: NodeState, drive: Drive) -> None:
    with Qmp(lab.qmp_socket(state.name)) as qmp:
        node.detach(lab, state, qmp, [drive])
    drive.path.unlink()
    state.drives.remove(drive)
    lab.write(state)


def _plug(lab: Lab, state: NodeState, drive: Drive) -> None:
    node.create_drive(drive)
    with Qmp(lab.qmp_socket(state.name)) as qmp:
        node.attach(qmp, drive)
    state.drives.append(drive)
    state.drives.sort(key=lambda each: each.port)
    lab.write(state)
    ssh.run(lab, state, guest.wait_for_drives(len(state.drives)))
