"""The memory of a booted node, saved once and restored in seconds.

QEMU refuses to migrate NVMe drives, so the snapshot holds a machine with empty slots; a node's drives are
hot-added after it was restored. The disk of that moment belongs to the memory: it is frozen
with it and every node writes to its own overlay.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.lab import guest, qemu, recipe, ssh
from tunetool.lab.image import Image
from tunetool.lab.machine import Boot, Machine
from tunetool.lab.programs import FULL, failure_of
from tunetool.lab.qemu import Qmp
from tunetool.lab.state import InDirectory, Lab, NodeState
from tunetool.node.common.waiting import wait_for

BOOT_SECONDS = 300.0
MIGRATE_SECONDS = 120.0


@dataclass(frozen=True)
class Snapshot:
    """A saved machine: its memory and the disk that belongs to it."""

    directory: Path

    memory = InDirectory("memory")
    """File that ``migrate`` wrote."""
    disk = InDirectory("disk.qcow2")
    """The disk at that moment, an overlay over the image. Never written again."""


def snapshot_of(image: Image, node: NodeState) -> Snapshot:
    """Where the snapshot for nodes like ``node`` is or would be."""
    key = [qemu.qemu_version(), recipe.KERNEL_CMDLINE, guest.SETTLE, *_shape(node)]
    if node.accel == "kvm":
        # `-cpu host` is another CPU on another machine, and a home directory can be shared.
        key.append(_cpu_model())
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]
    return Snapshot(image.directory / f"snapshot-{digest}")


def ensure_snapshot(lab: Lab, image: Image, template: NodeState, say: Callable[[str], None]) -> Snapshot:
    """The snapshot for nodes like ``template``; boots one when the cache has none."""
    snapshot = snapshot_of(image, template)
    if snapshot.memory.exists():
        return snapshot
    say(f"booting {image.os_name} once to take the snapshot ({template.accel})")
    work = Path(tempfile.mkdtemp(prefix=".building-", dir=image.directory))
    try:
        _take(lab, image, template, Snapshot(work))
        work.rename(snapshot.directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return snapshot


def create_overlay(path: Path, base: Path, base_format: str) -> None:
    """A disk that reads through to ``base`` and keeps its own writes."""
    error = failure_of(["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(base), "-F", base_format, str(path)])
    if error is not None:
        raise CannotJudge(f"`{path}`: {error}", FULL)


def load(qmp: Qmp, snapshot: Snapshot) -> None:
    """Restore the memory of a machine that waits for a snapshot."""
    descriptor = os.open(snapshot.memory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        qmp.pass_file("memory", descriptor)
        qmp.command("migrate-incoming", {"uri": "fd:memory"})
    finally:
        os.close(descriptor)
    _wait_migrated(qmp)


def store(qmp: Qmp, path: Path) -> None:
    """Write the memory of a stopped machine to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        qmp.pass_file("memory", descriptor)
        # The default of 128 MiB/s is meant for shared networks.
        qmp.command("migrate-set-parameters", {"max-bandwidth": 2**40})
        qmp.command("migrate", {"uri": "fd:memory"})
    finally:
        os.close(descriptor)
    _wait_migrated(qmp)


def _take(lab: Lab, image: Image, template: NodeState, target: Snapshot) -> None:
    create_overlay(target.disk, image.root, "raw")
    node = replace(template, name="boot", drive_count=0, drive_size=0, ssh_port=qemu.pick_port(set()))
    directory = lab.node_dir(node.name)
    # A killed `up` may have left it.
    for pid in qemu.all_under(directory):
        qemu.end(pid)
    directory.mkdir(exist_ok=True)
    machine = lab.machine(node, target.disk, Boot(image.kernel, image.initrd, recipe.KERNEL_CMDLINE))
    try:
        qemu.start(machine)
        ssh.wait_for_server(node, BOOT_SECONDS, lambda: qemu.pid_of(machine.pid_file) is not None)
        ssh.run(lab, node, guest.SETTLE, BOOT_SECONDS)
        with Qmp(machine.qmp_socket) as qmp:
            qmp.command("stop")
            store(qmp, target.memory)
    finally:
        for pid in qemu.all_under(directory):
            qemu.end(pid)
        lab.remove_node(node.name)


def _wait_migrated(qmp: Qmp) -> None:
    def is_done() -> bool:
        reply = qmp.command("query-migrate")
        status = reply.get("status")
        if status in ("failed", "cancelled"):
            raise CannotJudge(
                f"QEMU could not move the machine's state: {reply.get('error-desc', status)}",
                "is the file system full? otherwise: tunetool lab up --fresh",
            )
        return bool(status == "completed")

    if not wait_for(is_done, MIGRATE_SECONDS, 0.03):
        raise CannotJudge(f"QEMU did not move the machine's state within {MIGRATE_SECONDS:.0f} s")


def _shape(node: NodeState) -> list[str]:
    # Everything except the paths of files and the ssh port, which differ from node to node.
    nowhere = Path("/")
    paths = (nowhere, "qcow2", 0, nowhere, nowhere, nowhere)
    return Machine("", node.memory, node.accel, node.ports, *paths, numa=node.numa).arguments()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
