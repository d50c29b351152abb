"""From eight blank drives to a verified node, and what is found when something breaks. Tests run in this order."""

from __future__ import annotations

import json

import pytest
from conftest import POINT, Lab, changed_tasks
from summaries import host_row

pytestmark = pytest.mark.usefixtures("marker")

# Emulation reaches it with room to spare; the tests are about verdicts, never about speed.
REACHABLE = ("--expect", "read=20MBps,write=20MBps", "--duration", "2s")


# One round trip costs a second and a half here, and on four hundred nodes as many connections: a task more is a choice.
TRIPS_TO_BUILD = 10
TRIPS_TO_LOOK = 8


def data_drives(lab: Lab) -> list[tuple[str, str]]:
    """(serial, signatures) of the data drives."""
    text = lab.ssh(
        "node1", "lsblk -dno NAME,SERIAL | grep NV | while read n s; do echo $s $(wipefs -n /dev/$n | wc -l); done"
    )
    rows = [line.split() for line in text.splitlines()]
    return sorted((serial, count) for serial, count in rows)


def test_check_mode_tells_the_truth_on_a_blank_node_and_changes_nothing(lab: Lab) -> None:
    before = data_drives(lab)
    done = lab.site("--check", "--diff")
    assert done.code == 0, done.text
    for word in (
        "slot 7: LAB1NV8",
        f"{POINT} xfs noatime",
        "su=1048576 sw=8, log su=262144",
        "nr_hugepages",
        "node.json",
    ):
        assert word in done.stdout, word
    assert data_drives(lab) == before
    assert (
        lab.ssh("node1", "ls /etc/tunetool /opt/tunetool 2>/dev/null; cat /proc/mdstat | grep -c active; true") == "0"
    )


def test_a_blank_node_becomes_a_checked_one(lab: Lab) -> None:
    done = lab.site()
    assert done.code == 0, done.text
    manifest = json.loads(lab.ssh("node1", "cat /etc/tunetool/node.json"))
    assert [member["serial"] for member in manifest["array"]["members"]] == [f"LAB1NV{slot}" for slot in range(1, 9)]
    geometry = lab.ssh("node1", f"xfs_info {POINT}")
    assert "sunit=256    swidth=2048 blks" in geometry
    assert "sunit=64 blks" in geometry
    assert lab.ssh("node1", "cat /sys/block/md*/md/chunk_size") == "1048576"
    assert lab.ssh("node1", f"stat -c '%a %U' {POINT}/deepspeed_offload") == "1777 root"
    _host, result, _tasks, _changed, trips, *_rest = host_row(done.stdout, "node1")
    assert result == "BUILT"
    assert 0 < int(trips) <= TRIPS_TO_BUILD


def test_a_second_run_changes_nothing(lab: Lab) -> None:
    done = lab.site()
    assert done.code == 0, done.text
    assert changed_tasks(done.stdout) == []
    assert "changed=0" in done.stdout
    _host, result, _tasks, _changed, trips, *_rest = host_row(done.stdout, "node1")
    assert result == "UNCHANGED"
    assert 0 < int(trips) <= TRIPS_TO_LOOK


def test_verify_passes_and_proves_its_bytes(lab: Lab) -> None:
    done = lab.verify(*REACHABLE)
    assert done.code == 0, done.text
    assert "PASS" in done.stdout
    record = lab.record()
    assert record["verdict"]["status"] == "pass"
    assert {check["status"] for check in record["checks"]} <= {"pass", "skip"}
    figures = [one for one in record["measurements"] if one["name"].startswith("sequential")]
    assert len(figures) == 2
    for measurement in figures:
        assert 0.98 <= measurement["evidence"]["ratio"] <= 1.02
        assert "RAID0" in measurement["medium"]
    assert lab.ssh("node1", f"ls -A {POINT}") == "deepspeed_offload"


def test_verify_fails_below_an_expectation_and_names_it(lab: Lab) -> None:
    done = lab.verify("--expect", "900GBps", "--duration", "1s")
    assert done.code == 1, done.text
    assert "FAIL" in done.stdout
    assert "900 GB/s" in done.stdout


def test_all_is_there_after_a_real_reboot(lab: Lab) -> None:
    before = json.loads(lab.ssh("node1", "cat /etc/tunetool/node.json"))
    lab.lab("reboot", "node1")
    lab.lab("inventory", "--output", str(lab.inventory / "hosts.yml"))
    text = lab.ssh(
        "node1",
        f"findmnt -no UUID {POINT}; ls /dev/md/; cat /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages;"
        " findmnt -bno SIZE /dev/shm; ulimit -l; cat /sys/block/md*/md/array_state",
    )
    assert text.splitlines()[:5] == [before["filesystem"]["uuid"], "nvme_raid0", "64", str(512 * 2**20), "unlimited"]
    done = lab.verify(*REACHABLE)
    assert done.code == 0, done.text


def test_nothing_is_left_to_change_after_the_reboot(lab: Lab) -> None:
    done = lab.site()
    assert done.code == 0, done.text
    assert changed_tasks(done.stdout) == []


def test_a_slow_drive_is_named_by_its_serial(lab: Lab) -> None:
    lab.lab("fault", "node1", "slow-drive", "--drive", "LAB1NV5")
    done = lab.verify(*REACHABLE)
    assert done.code == 1, done.text
    record = lab.record()
    findings = [check for check in record["checks"] if check["status"] == "fail"]
    assert [check["id"] for check in findings] == ["drives.balance"]
    assert "LAB1NV5" in findings[0]["found"]
    assert findings[0]["remedy"]


def test_a_drive_pulled_under_its_mount_is_named_and_nothing_is_rebuilt(lab: Lab) -> None:
    lab.lab("fault", "node1", "remove-drive", "--drive", "LAB1NV3")
    done = lab.verify("--level", "config")
    assert done.code == 1, done.text
    assert "LAB1NV3" in done.stdout
    done = lab.site()
    assert done.code != 0
    assert "8 drives asked for, 7 usable" in done.stdout
    assert lab.ssh("node1", "cat /sys/block/md*/md/raid_disks") == "8"
