"""A node is built, verified and rebooted, and faults are found.

`make test` runs this; molecule/node (test_scenario.py) checks everything that a build leaves, from outside.
"""

from __future__ import annotations

import pytest
from conftest import POINT, Lab, changed_tasks
from summaries import TRIPS_TO_BUILD, TRIPS_TO_LOOK, host_row

pytestmark = pytest.mark.usefixtures("marker")

# Emulation reaches it with room to spare; the tests are about verdicts, never about speed.
REACHABLE = ("--expect", "read=1MBps,write=1MBps", "--duration", "1s")


def test_a_run_takes_few_round_trips(built: Lab) -> None:
    done = built.site()
    assert done.code == 0, done.text
    assert changed_tasks(done.stdout) == []
    for output, expected, most in (
        (built.build_output(), "BUILT", TRIPS_TO_BUILD),
        (done.stdout, "UNCHANGED", TRIPS_TO_LOOK),
    ):
        _host, result, _tasks, _changed, trips, *_rest = host_row(output, "node1")
        assert result == expected
        assert 0 < int(trips) <= most


def test_verify_passes_and_proves_its_bytes(built: Lab) -> None:
    done = built.verify(*REACHABLE)
    assert done.code == 0, done.text
    assert "PASS" in done.stdout
    record = built.record()
    assert record["verdict"]["status"] == "pass"
    assert {check["status"] for check in record["checks"]} <= {"pass", "skip"}
    figures = [figure for figure in record["measurements"] if figure["name"].startswith("sequential")]
    assert len(figures) == 2
    for measurement in figures:
        assert 0.98 <= measurement["evidence"]["ratio"] <= 1.02
        assert "RAID0" in measurement["medium"]
    assert built.ssh("node1", f"ls -A {POINT}") == "deepspeed_offload"


def test_everything_is_there_after_a_reboot(built: Lab) -> None:
    boot = "cat /proc/sys/kernel/random/boot_id"
    before = built.ssh("node1", boot)
    built.ssh("node1", f"echo kept > {POINT}/deepspeed_offload/kept && sync")
    built.reboot("node1")
    assert built.ssh("node1", boot) != before
    done = built.verify("--level", "config")
    assert done.code == 0, done.text
    assert {check["status"] for check in built.record()["checks"]} <= {"pass", "skip"}
    text = built.ssh(
        "node1", f"findmnt -no FSTYPE {POINT}; cat {POINT}/deepspeed_offload/kept; systemctl --failed --no-legend"
    )
    assert text.split() == ["xfs", "kept"]


@pytest.mark.slow  # the name and the verdict are in tests/unit/test_verify.py, that drives of a node are measured is above
def test_a_slow_drive_is_named_by_its_serial(built: Lab) -> None:
    built.lab("fault", "node1", "slow-drive", "--drive", "LAB1NV5")
    done = built.verify(*REACHABLE)
    assert done.code == 1, done.text
    record = built.record()
    findings = [check for check in record["checks"] if check["status"] == "fail"]
    assert [check["id"] for check in findings] == ["drives.balance"]
    assert "LAB1NV5" in findings[0]["found"]
    assert findings[0]["remedy"]


def test_a_lost_drive_is_named_and_the_node_boots_without_it(built: Lab) -> None:
    built.lab("fault", "node1", "remove-drive", "--drive", "LAB1NV3")
    done = built.verify("--level", "config")
    assert done.code == 1, done.text
    assert "LAB1NV3" in done.stdout
    done = built.site()
    assert done.code != 0
    assert "8 drives asked for, 7 usable" in done.stdout
    assert built.ssh("node1", "cat /sys/block/md*/md/raid_disks") == "8"
    # This fails if ssh does not answer in time: a boot that waits for the array would hang here.
    built.reboot("node1")
    text = built.ssh("node1", f"mountpoint -q {POINT} && echo mounted; touch {POINT}/x 2>&1 || true")
    assert text == f"touch: cannot touch '{POINT}/x': Operation not permitted"
