"""`bench drives` where md and NVMe drives are: a built node is read without a change, blank drives are blank afterwards."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from conftest import POINT, Done, Lab, checksums

pytestmark = [pytest.mark.usefixtures("marker"), pytest.mark.slow]

BENCH = "tunetool bench drives --runs-dir /tmp/runs --engines fio-libaio --rounds 1 --duration 1s --allow-busy"
BLANK = "--drives LAB1NV1,LAB1NV2 --counts 1,2"
FOUR = "--drives LAB1NV1,LAB1NV2,LAB1NV3,LAB1NV4 --counts 2,4"
LEFT = "lsblk -rno NAME,FSTYPE,MOUNTPOINT | grep -E 'nvme|md' | sort; cat /proc/mdstat; losetup -a"


def bench(lab: Lab, arguments: str) -> tuple[Done, dict[str, Any]]:
    done = lab.tool("lab", "ssh", "node1", "--", f"{BENCH} {arguments} --json -")
    start = done.stdout.find("{")
    assert start >= 0, done.text
    return done, json.loads(done.stdout[start:])


def layouts_of(record: dict[str, Any]) -> set[tuple[str, int]]:
    known = [each["parameters"] for each in record["measurements"] if each["name"].endswith(".bandwidth")]
    return {(each["layout"], each["drives"]) for each in known}


def proven(record: dict[str, Any]) -> None:
    for each in record["measurements"]:
        if each["name"].endswith(".bandwidth"):
            assert 0.98 <= each["evidence"]["ratio"] <= 1.02, each["name"]


def freed(lab: Lab) -> None:
    """The node without its array, its manifest and its volume: two of its drives are blank by tunetool's own wipe."""
    wipe = (
        "from tunetool.node.machine.drives import read_drives; from tunetool.node.removal.wipe_drives import wipe; "
        "wipe([drive for drive in read_drives() if drive.serial.startswith('LAB1NV')])"
    )
    lab.ssh("node1", f"umount {POINT}; rm /etc/tunetool/node.json")
    lab.ssh("node1", f'$(dirname $(readlink -f /opt/tunetool/bin/tunetool))/python -c "{wipe}"')


def killed(lab: Lab, arguments: str) -> None:
    """A run that is killed outright while it measures, and whose janitor has ended."""
    script = (
        f"({BENCH} {arguments} --rounds 1000 --bytes-per-drive 64MiB >/tmp/said 2>&1 & "
        "echo $! > /tmp/pid); until ls /tmp/tunetool-*/volume/part-2/data.1 2>/dev/null; do sleep 1; done; "
        f"kill -{int(signal.SIGKILL)} $(cat /tmp/pid); "
        "while pgrep -f '[j]anitor.py'; do sleep 1; done"
    )
    lab.ssh("node1", script)


def test_a_built_node_is_read_drive_by_drive_and_unchanged(built: Lab) -> None:
    before = checksums(built), built.ssh("node1", LEFT)
    done, record = bench(built, f"--target {POINT} --bytes-per-drive 64MiB")
    assert done.code == 0, done.text
    assert layouts_of(record) == {
        *(("drives-raw", each) for each in (1, 2, 4, 8)),
        ("array-raw", 8),
        ("array-files", 8),
    }
    proven(record)
    raw = [each for each in record["measurements"] if each["parameters"].get("layout") in ("drives-raw", "array-raw")]
    assert {each["parameters"]["direction"] for each in raw} == {"read"}
    assert (checksums(built), built.ssh("node1", LEFT)) == before
    assert built.ssh("node1", f"ls -A {POINT}") == "deepspeed_offload"
    # Members of the node's array are never taken, whatever is asked.
    refused = built.tool("lab", "ssh", "node1", "--", f"{BENCH} {BLANK}")
    assert refused.code == 3
    assert "drive `LAB1NV1` is a member of this node's array" in refused.text
    assert checksums(built) == before[0]


def test_layouts_are_made_on_blank_drives_and_leave_them_blank(built: Lab) -> None:
    freed(built)
    before = built.ssh("node1", LEFT)
    layouts = "--layout raid0-xfs,raid0-ext4,xfs-per-drive,ext4-per-drive --bytes-per-drive 64MiB"
    done, record = bench(built, f"{BLANK} {layouts}")
    assert done.code == 0, done.text
    names = ("raid0-xfs", "raid0-ext4", "xfs-per-drive", "ext4-per-drive")
    assert layouts_of(record) == {(name, drives) for name in names for drives in (1, 2)}
    proven(record)
    media = {each["medium"] for each in record["measurements"]}
    assert {"md RAID0 (2 x nvme), xfs", "md RAID0 (2 x nvme), ext4", "2 x nvme, xfs on each"} <= media
    assert {each["id"]: each["status"] for each in record["checks"]} == {"scaling.taken-down": "pass"}
    assert built.ssh("node1", LEFT) == before
    # And again, because each run begins by refusing what is not blank; this one is killed.
    killed(built, f"{BLANK} --layout raid0-xfs --counts 2")
    assert built.ssh("node1", LEFT) == before
    again = built.tool("lab", "ssh", "node1", "--", f"{BENCH} {BLANK} --dry-run")
    assert again.code == 0, again.text
    # One that holds something is refused, and stays as it is.
    held = (
        "d=/dev/$(lsblk -dno NAME,SERIAL | awk '$2==\"LAB1NV2\"{print $1}'); mkfs.ext4 -q $d; blkid -o value -s UUID $d"
    )
    uuid = built.ssh("node1", held)
    refused = built.tool("lab", "ssh", "node1", "--", f"{BENCH} {BLANK}")
    assert refused.code == 3
    assert f"holds ext4 UUID {uuid}" in refused.text
    assert uuid in built.ssh("node1", "blkid")


def test_what_a_level_costs_is_measured_on_blank_drives(built: Lab) -> None:
    freed(built)
    before = built.ssh("node1", LEFT)
    layouts = "--layout raid0-xfs,raid10-xfs,raid1-xfs --bytes-per-drive 64MiB"
    done, record = bench(built, f"{FOUR} {layouts}")
    assert done.code == 0, done.text
    both = {(name, drives) for name in ("raid0-xfs", "raid1-xfs") for drives in (2, 4)}
    assert layouts_of(record) == {*both, ("raid10-xfs", 4)}
    proven(record)
    # A written byte lands on each drive that has to have it, one that is read comes from one: md makes nothing alike.
    mirrors = [each for each in record["measurements"] if "drive_bytes_ratio" in each["parameters"]]
    assert len(mirrors) == 6
    for each in mirrors:
        asked = each["parameters"]
        due = asked["copies"] if asked["direction"] == "write" else 1
        assert 0.98 * due <= asked["drive_bytes_ratio"] <= 1.02 * due, each["name"]
    ratios = {each["name"] for each in record["measurements"] if each["name"].endswith("_over_raid0")}
    assert "scaling.raid10-xfs.4.fio-libaio.write.raid10_over_raid0" in ratios
    assert {each["id"]: each["status"] for each in record["checks"]} == {
        "scaling.layout.raid10-xfs.2": "skip",
        "scaling.taken-down": "pass",
    }
    assert built.ssh("node1", LEFT) == before
    killed(built, f"{FOUR} --layout raid10-xfs")
    assert built.ssh("node1", LEFT) == before
    again = built.tool("lab", "ssh", "node1", "--", f"{BENCH} {FOUR} --dry-run")
    assert again.code == 0, again.text
