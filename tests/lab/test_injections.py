"""The table of injections: a node that is watched by its timer is broken in one way, and the next check says so, by the name
of what is broken. Each row is printed for docs/guides/health-check.md.

A node comes back to the state in which it was saved just after a check, so the timer leaves each fault nearly a whole
period to wait.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from conftest import POINT, Lab

from tunetool.lab.qemu import Qmp
from tunetool.lab.state import Lab as State

pytestmark = [pytest.mark.usefixtures("marker"), pytest.mark.slow]

PERIOD, SLACK = 60, 15
"""Seconds: of `node_health_period`, and of the timer's `AccuracySec`."""
LONGEST = 60
"""Seconds after which systemd ends a check of that period."""
ON = ("-e", json.dumps({"node_health_enabled": True, "node_health_period": PERIOD}))
DRIVE = "LAB1NV3"
# What Slurm's program asks of the controller; tests/cluster has a real one.
SCONTROL = r"""printf '%s\n' '#!/bin/sh' 'case "$*" in *show*) echo "NodeName=node1 State=IDLE";; esac' \
> /usr/local/bin/scontrol; chmod +x /usr/local/bin/scontrol"""
CHECKED = "systemctl start tunetool-health.service; cat /run/tunetool/health.json"
# In one connection, since each further one takes seconds from the node. A check that had begun before may see half of it.
WAIT = """import json, os, re, subprocess, sys, time
began, limit, says = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
while True:
    at = os.stat("/run/tunetool/health.json").st_mtime
    result = json.load(open("/run/tunetool/health.json"))
    named = [line for line in [*result["failed"], *result["doubts"]] if re.match(says, line)]
    if at > began and named or time.time() > began + limit:
        break
    time.sleep(0.2)
slurm = subprocess.run(["/opt/tunetool/bin/tunetool-health"], capture_output=True, text=True).stdout
print(json.dumps(dict(result, named=named, seconds=at - began, slurm=slurm.strip())))
"""
DEVICE = f"device=$(lsblk -dno NAME,SERIAL | sed -n 's/ *{DRIVE}$//p')"


def at_once(command: str) -> Callable[[Lab], None]:
    """A fault that a command on the node makes."""
    return lambda lab: lab.ssh("node1", f"set -e; {command}") and None


def qmp(lab: Lab, name: str, **arguments: Any) -> None:
    with Qmp(State(lab.state).qmp_socket("node1")) as monitor:
        monitor.command(name, arguments)


def limited(bps: int) -> Callable[[Lab], None]:
    """The drive's speed: with 1 it takes an hour for a block; 0 for no limit."""

    def limit(lab: Lab) -> None:
        limits = dict.fromkeys(("bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr"), 0)
        drive = State(lab.state).read("node1").drive(DRIVE)
        qmp(lab, "block_set_io_throttle", id=drive.device_id, bps=bps, **limits)

    return limit


def returns_errors(lab: Lab) -> None:
    """Each read and write of the drive ends with an error."""
    layer, reopened = State(lab.state).read("node1").drive(DRIVE).going_bad()
    layer["inject-error"] = [{"event": "none", "iotype": kind, "errno": 5} for kind in ("read", "write")]
    qmp(lab, "blockdev-add", **layer)
    qmp(lab, "blockdev-reopen", options=[reopened])


def bad_block(lab: Lab) -> None:
    """A job meets one of the drive's bad sectors."""
    lab.lab("fault", "node1", "io-errors", "--drive", DRIVE)
    lab.ssh("node1", f"{DEVICE}; dd if=/dev/$device of=/dev/null bs=1M skip=8 count=16 iflag=direct || true")


def warns(lab: Lab) -> None:
    """The drive says that its media have become unreliable."""
    drive = State(lab.state).read("node1").drive(DRIVE)
    path = f"/machine/peripheral/{drive.device_id}"
    qmp(lab, "qom-set", path=path, property="smart_critical_warning", value=1 << 2)


# Before the node resets its controller: QEMU would stand still until all requests are done.
HEALED = limited(0)


@dataclass(frozen=True)
class Row:
    """An injection, and what the node's health says of it."""

    what: str
    inject: Callable[[Lab], None]
    says: str
    """Begins one of the lines: a regular expression."""
    heal: Callable[[Lab], None] = lambda lab: None
    """What must be undone soon."""
    status: str = "fail"


ROWS_OF_DRIVES = (
    Row(
        "a drive pulled",
        lambda lab: lab.lab("fault", "node1", "remove-drive", "--drive", DRIVE) and None,
        f"array.assembled: not assembled; missing `{DRIVE}`",
    ),
    Row("a drive that returns errors", returns_errors, f"drives.answer: `{DRIVE}`: No data available"),
    Row("a bad block of a drive that a job met", bad_block, f"kernel.drives: `{DRIVE}`: it "),
    Row("a drive that never answers", limited(1), f"drives.answer: `{DRIVE}` did not answer for 10 s", HEALED),
    Row("a drive's critical warning", warns, f"drives.critical_warning: `{DRIVE}`: the media have become unreliable"),
    Row(
        "a drive's link slower than drive and slot allow (the kernel's file for the drive's own speed covered by another)",
        at_once(
            f"{DEVICE}; echo '16.0 GT/s PCIe' > /run/speed; "
            "mount --bind /run/speed $(realpath /sys/block/$device/device/device)/max_link_speed"
        ),
        rf"drives.link: `{DRIVE}` at [0-9a-f:.]+: 2.5 GT/s x1 of 16 GT/s x1",
    ),
)
STOP = f"umount {POINT}; mdadm --stop /dev/md/nvme_raid0"
# The member's own line, and not the array's, names the drive.
FAIL = f"{DEVICE}; for member in /sys/block/md*/md/dev-$device; do echo faulty > $member/state || true; done"
OTHER_ARRAY = """for image in /boot/initrd.img-*; do
    zcat $image | sed 's/UUID=[0-9a-f]\\{8\\}:/UUID=00000000:/' | gzip -1 > /root/other
    cp /root/other $image; done"""
ROWS_OF_ARRAY = (
    Row("the array stopped", at_once(STOP), "array.assembled: not assembled"),
    Row(
        "the array broken, as md calls it",
        at_once(FAIL),
        f"kernel.drives: `{DRIVE}`: md calls it failed",
    ),
    Row(
        "an initramfs without the array",
        at_once(OTHER_ARRAY),
        r"array.initramfs: /boot/initrd.img-\S+: it lacks `ARRAY /dev/md/nvme_raid0 ",
    ),
)
FULL = f"""for size in 16G 8G 4G 2G 1G 512M 256M 128M 64M 16M 4M 1M 256k 64k 16k 4k; do n=0
    while fallocate -l $size {POINT}/$size.$n 2>/dev/null; do n=$((n+1)); done; done"""
# The counter alone: as many files would take hours here. What still fits are the inodes of the first chunk.
NO_INODE = f"""umount {POINT}; xfs_db -x -c 'sb 0' -c 'write -d icount 20000000' /dev/md/nvme_raid0; mount {POINT}
touch {POINT}/$(seq -s ' {POINT}/' 100) || true"""
ROWS_OF_VOLUME = (
    Row(
        "the file system shut down",
        at_once(f"xfs_io -x -c 'shutdown -f' {POINT}"),
        "filesystem.answers: XFS is shut down: every access fails with an I/O error",
    ),
    Row(
        "the volume mounted read-only",
        at_once(f"mount -o remount,ro {POINT}"),
        f"filesystem.writable: `{POINT}` is mounted read-only",
    ),
    Row(
        "the volume full",
        at_once(FULL),
        "filesystem.answers: it is full, so nothing could be written: ",
        status="unproven",
    ),
    Row(
        "no inode left",
        at_once(NO_INODE),
        "filesystem.answers: it has room and no inode left ",
        status="unproven",
    ),
)


@pytest.fixture(scope="module")
def saved(built_once: Lab) -> Lab:
    """A node that passed its check just now."""
    built_once.reset("node1", "--to", "built")
    done = built_once.site("--tags", "health", *ON)
    assert done.code == 0, done.text
    result = json.loads(built_once.ssh("node1", f"{SCONTROL}; {CHECKED}"))
    assert result["status"] == "pass", result
    built_once.lab("save", "node1", "watched")
    return built_once


@pytest.fixture
def watched(saved: Lab) -> Lab:
    saved.reset("node1", "--to", "watched")
    return saved


def seen(lab: Lab, row: Row) -> None:
    """Inject, and wait for the timer's next checks."""
    began = lab.ssh("node1", "date +%s.%N")
    row.inject(lab)
    longest = PERIOD + SLACK + LONGEST
    words = [began, str(longest), row.says]
    result = json.loads(lab.ssh("node1", f"python3 - {shlex.join(words)} << 'END'\n{WAIT}END"))
    row.heal(lab)
    said = (result["named"] or [""])[0]
    print(f"| {row.what} | {result['seconds']:.0f} s | {result['status']} | {said} | {result['slurm'] or 'nothing'} |")
    assert said, result
    assert result["status"] == row.status, result
    drained = f"drained `node1`: tunetool health: {row.says}" if row.status == "fail" else "$"
    assert re.match(drained, result["slurm"]), result
    assert result["seconds"] < longest
    assert lab.ssh("node1", "systemctl list-units --failed --no-legend 'tunetool-health*'") == ""


@pytest.mark.parametrize("row", ROWS_OF_DRIVES, ids=lambda row: row.what)
def test_a_faulty_drive_is_named_by_the_next_check(watched: Lab, row: Row) -> None:
    seen(watched, row)


@pytest.mark.parametrize("row", ROWS_OF_ARRAY, ids=lambda row: row.what)
def test_a_faulty_array_is_named_by_the_next_check(watched: Lab, row: Row) -> None:
    seen(watched, row)


@pytest.mark.parametrize("row", ROWS_OF_VOLUME, ids=lambda row: row.what)
def test_a_faulty_volume_is_named_by_the_next_check(watched: Lab, row: Row) -> None:
    seen(watched, row)
