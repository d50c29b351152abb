"""One node: starts it from its snapshot or its own disk, attaches its drives, ends it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tunetool.errors import CannotJudge
from tunetool.lab import guest, qemu, snapshot, ssh
from tunetool.lab.image import Image
from tunetool.lab.machine import Boot, Drive
from tunetool.lab.programs import FULL, failure_of
from tunetool.lab.qemu import Qmp
from tunetool.lab.quiesce import DriveUse, bring_back
from tunetool.lab.recipe import SYSTEM_LABEL
from tunetool.lab.snapshot import Snapshot
from tunetool.lab.state import Lab, NodeState, data_serial
from tunetool.node.common.waiting import wait_for
from tunetool.system_packages import find

BOOT_SECONDS = 300.0
SHUTDOWN_SECONDS = 120.0
PREPARE_SECONDS = 120.0
ENUMERATE_SECONDS = 30.0
UNPLUG_SECONDS = 60.0
_PORT_ATTEMPTS = 5
_MKE2FS = ("-q", "-F", "-t", "ext4", "-E", "root_owner=0:0,lazy_itable_init=1,lazy_journal_init=1")


def alive(lab: Lab, name: str) -> bool:
    """Whether the node's QEMU runs."""
    return qemu.pid_of(lab.pid_file(name)) is not None


def start_restored(lab: Lab, node: NodeState, saved: Snapshot, drives: Path | None = None) -> None:
    """Start the node from a snapshot, with blank drives or copies of those in ``drives``.

    ``finish_preparing`` waits until it is usable.
    """
    directory = lab.node_dir(node.name)
    directory.mkdir(parents=True)
    lab.write(node)
    # A port may lead to a node of another image now; ssh learns the key again.
    lab.known_hosts.unlink(missing_ok=True)
    snapshot.create_overlay(directory / "disk.qcow2", saved.disk, "qcow2")
    if drives is None:
        _create_drives(lab, node)
    else:
        _copy_drives(drives, node)
    _launch(lab, node, restored=True)
    with Qmp(lab.qmp_socket(node.name)) as qmp:
        snapshot.load(qmp, saved)
        qmp.command("cont")
        # The guest numbers controllers in the order in which it finds them, and finds those that wait together
        # from the last slot to the first. One at a time, the ninth becomes nvme0n1, as a boot drive does.
        for drive in node.drives:
            attach(qmp, drive)
            _wait_enumerated(node, qmp, drive)
    lab.write(node)


def start_booted(lab: Lab, node: NodeState) -> None:
    """Boot the node with what its own disk holds, all drives present from the start."""
    directory = lab.node_dir(node.name)
    for drive in node.drives:
        if not drive.path.exists():
            raise CannotJudge(f"`{drive.path}` is gone", f"tunetool lab reset {node.name}")
    log = directory / "serial.log"
    log_text = log.stat().st_size
    _launch(lab, node, restored=False)
    node.booted_from = "disk"
    lab.write(node)

    def boots() -> bool:
        _stop_when_stuck(node, log, log_text)
        return alive(lab, node.name)

    ssh.wait_for_server(node, BOOT_SECONDS, boots)


def _stop_when_stuck(node: NodeState, log: Path, offset: int) -> None:
    # A boot loader without its kernel, a kernel without its root, or an initramfs that gave up: the boot has failed.
    for line in log.read_bytes()[offset:].decode(errors="replace").splitlines():
        if "Kernel panic" in line or line.startswith(("(initramfs)", "error: file `")) or "Dropping to a shell" in line:
            raise CannotJudge(
                f"`{node.name}` does not boot: {line.strip()}",
                f"its console output is in {log}; start over with: tunetool lab reset {node.name}",
            )


def start_preparing(lab: Lab, node: NodeState, drive_use: DriveUse | None = None) -> subprocess.Popen[str]:
    """Start giving the node its name, clock, drives and, with ``drive_use``, what was on them."""
    serials = [drive.shown_serial for drive in node.drives if drive.shown_serial]
    script = guest.prepare(node.name, node.index, serials, time.time(), offline=node.offline)
    return ssh.start(lab, node, script + bring_back(drive_use) if drive_use else script)


class NotReady(CannotJudge):
    """A started node is incomplete: sometimes a hot-plug event is lost, or udev hangs."""


def finish_preparing(node: NodeState, preparing: subprocess.Popen[str]) -> str:
    """Wait until the node sees its drives and its system drive is mounted. Returns the system drive's device.

    Raises ``NotReady``.
    """
    try:
        return ssh.finish(node, preparing, PREPARE_SECONDS).stdout.strip()
    except CannotJudge as error:
        raise NotReady(error.message, error.hint) from None


def shut_down(lab: Lab, node: NodeState) -> None:
    """Shut the node down cleanly from inside; power it off if it does not respond."""
    pid = qemu.pid_of(lab.pid_file(node.name))
    if pid is None:
        return
    try:
        ssh.run(lab, node, "systemctl poweroff --no-block\n", 30)
    except CannotJudge:
        power_loss(lab, node)
        return
    if not qemu.wait_gone(pid, SHUTDOWN_SECONDS):
        power_loss(lab, node)


def power_loss(lab: Lab, node: NodeState) -> None:
    """Cut the node's power: data that it had not written is lost.

    Through the monitor and not by a signal that QEMU cannot see: the guest stops at once, yet the layers of
    the disk image below it stay sound, as a real drive does.
    """
    pid = qemu.pid_of(lab.pid_file(node.name))
    if pid is None:
        return
    try:
        with Qmp(lab.qmp_socket(node.name), connect_seconds=5) as qmp:
            qmp.command("stop")
            qmp.command("quit")
    except CannotJudge:
        pass
    if not qemu.wait_gone(pid, 10):
        qemu.end(pid)


def end(lab: Lab, name: str) -> None:
    """End the node's QEMU in any state, and remove the node."""
    ssh.end_masters(lab, name)
    for pid in qemu.all_under(lab.node_dir(name)):
        qemu.end(pid)
    lab.remove_node(name)


def attach(qmp: Qmp, drive: Drive) -> None:
    """Hot-add a drive."""
    qmp.command("blockdev-add", drive.blockdev())
    qmp.command("device_add", drive.device())


def detach(lab: Lab, node: NodeState, qmp: Qmp, drives: Sequence[Drive]) -> None:
    """Pull drives out of their slots and wait until the node has seen it.

    The node lets go of them first, as it does when a slot's button is pressed. QEMU 7.2 once ended with SIGSEGV when a
    drive was pulled without that; the likely cause is a request of the controller that was still under way.
    """
    ids = {drive.device_id for drive in drives}
    pci_devices = _pci_devices(qmp.command("query-pci"))
    ssh.run(lab, node, guest.remove_devices([device.address for device in pci_devices if device.id in ids]))
    for drive in drives:
        qmp.command("device_del", {"id": drive.device_id})
    for drive in drives:
        qmp.wait_event("DEVICE_DELETED", UNPLUG_SECONDS, device=drive.device_id)
        qmp.command("blockdev-del", {"node-name": drive.node_name})
        if drive.bad_sectors and _is_there(qmp, drive.bad_node_name):
            # This layer was inserted while the drive ran, so QEMU does not remove it with the drive.
            qmp.command("blockdev-del", {"node-name": drive.bad_node_name})
    ssh.run(lab, node, guest.wait_for_drives(len(node.drives) - len(drives)))


def _is_there(qmp: Qmp, node_name: str) -> bool:
    block_nodes = qmp.command("query-named-block-nodes", {"flat": True})
    return any(block_node["node-name"] == node_name for block_node in block_nodes)


def _wait_enumerated(node: NodeState, qmp: Qmp, drive: Drive) -> None:
    def is_mapped() -> bool:
        pci_devices = _pci_devices(qmp.command("query-pci"))
        return any(device.id == drive.device_id and device.mapped for device in pci_devices)

    if not wait_for(is_mapped, ENUMERATE_SECONDS, 0.01):
        raise NotReady(f"`{node.name}` does not notice drive `{drive.serial}`", f"tunetool lab reset {node.name}")


class _PciDevice(NamedTuple):
    id: str
    address: str
    """As the node's kernel names it: 0000:01:00.0."""
    mapped: bool
    """Its registers have an address, so the node's kernel has found it."""


def _pci_devices(buses: list[dict[str, Any]]) -> Iterator[_PciDevice]:
    for bus in buses:
        for device in bus["devices"]:
            address = f"0000:{device['bus']:02x}:{device['slot']:02x}.{device['function']:x}"
            yield _PciDevice(device["qdev_id"], address, any(region["address"] > 0 for region in device["regions"]))
            bridge = device.get("pci_bridge")
            if bridge:
                yield from _pci_devices([bridge])


def create_drive(drive: Drive) -> None:
    """A blank drive: a sparse file."""
    drive.path.parent.mkdir(parents=True, exist_ok=True)
    with drive.path.open("xb") as file:
        file.truncate(drive.size)


def _create_drives(lab: Lab, node: NodeState) -> None:
    directory = lab.node_dir(node.name) / "drives"
    serials = [node.system_serial] + [data_serial(node.index, n + 1) for n in range(node.drive_count)]
    node.drives = [
        Drive(serial, directory / f"{serial}.img", node.drive_size, port) for port, serial in enumerate(serials)
    ]
    for drive in node.drives:
        create_drive(drive)
    _fill_system_drive(node.drives[0])


def _copy_drives(source: Path, node: NodeState) -> None:
    for drive in node.drives:
        drive.path.parent.mkdir(parents=True, exist_ok=True)
        error = failure_of(["cp", "--sparse=always", "--reflink=auto", str(source / drive.path.name), str(drive.path)])
        if error is not None:
            raise CannotJudge(f"`{drive.path}`: {error}", FULL)


def _fill_system_drive(drive: Drive) -> None:
    with TemporaryDirectory(prefix="tunetool-lab-") as content:
        Path(content, "MARKER").write_bytes(guest.marker(drive.serial))
        error = failure_of([find("mke2fs") or "mke2fs", *_MKE2FS, "-L", SYSTEM_LABEL, "-d", content, str(drive.path)])
    if error is not None:
        reason = (error or "no output").splitlines()[-1]
        raise CannotJudge(f"`mke2fs`: {reason.removeprefix('mke2fs: ')}", FULL)


def _launch(lab: Lab, node: NodeState, *, restored: bool) -> None:
    directory = lab.node_dir(node.name)
    for attempt in range(_PORT_ATTEMPTS):
        machine = lab.machine(node, directory / "disk.qcow2", Boot(Image(node.os_name, node.image).loader))
        try:
            qemu.start(replace(machine, restored=restored, drives=() if restored else tuple(node.drives)))
            return
        except CannotJudge as error:
            # Another program took the port between our check and QEMU's start.
            if "host forwarding" not in error.message or attempt == _PORT_ATTEMPTS - 1:
                raise
            node.ssh_port = qemu.pick_port({node.ssh_port})
            lab.write(node)
