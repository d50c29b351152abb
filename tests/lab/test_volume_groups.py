"""A node with a file system on each drive: built, rebooted, a drive lost and replaced, and given back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import POINT, Lab, build, changed_tasks, groups_of, play, row

pytestmark = pytest.mark.usefixtures("marker")

NAMES = [f"drive{number}" for number in range(8)]
SWAP = ("-e", "replace_drive_old_serial=LAB1NV2", "-e", "replace_drive_new_serial=LAB1NV2R")
FILL = f"for d in {POINT}/drive*; do head -c 3M /dev/urandom > $d/data; done; sync; "
SUMS = f"cd {POINT}; sha256sum drive*/data"


def three(second: str) -> tuple[str, str]:
    serials = ["LAB1NV1", second, "LAB1NV3"]
    return "-e", json.dumps({"nvme_drives_count": 3, "nvme_drives_serials": serials})


def mounted(lab: Lab) -> dict[str, str]:
    """Serial numbers of the drives by the mount point of the volume on them."""
    lines = lab.ssh(
        "node1",
        f"findmnt -rno TARGET,SOURCE | grep {POINT}/ | while read t s; do echo $t $(lsblk -dno SERIAL $s); done",
    )
    return dict(line.split() for line in lines.splitlines())


@pytest.mark.slow
def test_each_drive_has_its_volume_and_keeps_it_over_a_boot(blank: Lab) -> None:
    build(blank, "drive")
    wanted = {f"{POINT}/{name}": f"LAB1NV{number}" for number, name in enumerate(NAMES, start=1)}
    assert mounted(blank) == wanted
    assert blank.ssh("node1", "grep -c . /proc/mdstat; ls /dev/md* 2>/dev/null; true").split() == ["2"]
    assert blank.ssh("node1", f"lsattr -d {POINT} | cut -c5").strip() == "i"
    sums = blank.ssh("node1", FILL + SUMS)
    assert changed_tasks(build(blank, "drive")) == []
    other = blank.site()
    assert other.code != 0
    assert "`array.groups`: expected all, found drive" in " ".join(other.text.split())
    # Other slots: other kernel names and addresses.
    blank.reboot("node1", "--shuffle")
    assert mounted(blank) == wanted
    assert blank.ssh("node1", SUMS) == sums
    assert blank.ssh("node1", "systemctl is-system-running --wait || true; systemctl --failed --no-legend") == "running"
    # All together are fast enough, and one is not.
    build(blank, "drive", "-e", json.dumps({"tunetool_install": True}))
    blank.lab("fault", "node1", "slow-drive", "--drive", "LAB1NV5")
    done = blank.verify("--expect", "read=400MBps", "--duration", "1s")
    assert done.code == 1, done.text
    assert "volume `drive4` (drive `LAB1NV5`): sequential read" in " ".join(done.text.split())
    statuses = {each["name"]: each["status"] for each in blank.record()["expectations"]}
    assert statuses["sequential.read"] == "pass"
    assert statuses["sequential.read.drive4"] == "fail"


@pytest.mark.slow
def test_a_lost_drive_costs_its_volume_and_is_replaced(blank: Lab, tmp_path: Path) -> None:
    build(blank, "drive", *three("LAB1NV2"))
    sums = blank.ssh("node1", FILL + SUMS).splitlines()
    blank.lab("fault", "node1", "swap-drive", "--drive", "LAB1NV2")
    kept = [line for line in sums if "drive1" not in line]
    # What the page cache still has of the lost drive says nothing.
    now = blank.ssh("node1", SUMS + " 2>/dev/null || true").splitlines()
    assert [line for line in now if "drive1" not in line] == kept
    plan = tmp_path / "replace.json"
    swap = (*three("LAB1NV2R"), *SWAP)
    planned = play(blank, "drive", "replace_drive", *swap, "--tags", "plan", "-e", f"plan_file={plan}")
    assert "blank, comes for `LAB1NV2`" in row(planned, "LAB1NV2R")
    assert "keeps volume `drive2`" in row(planned, "LAB1NV3")
    play(blank, "drive", "replace_drive", *swap, "-e", f"apply_plan={plan}")
    assert mounted(blank)[f"{POINT}/drive1"] == "LAB1NV2R"
    assert blank.ssh("node1", SUMS + " 2>/dev/null || true").splitlines() == kept
    manifest = json.loads(blank.ssh("node1", "cat /etc/tunetool/node.json"))
    assert [volume["name"] for volume in manifest["volumes"]] == NAMES[:3]
    assert manifest["volumes"][1]["array"]["members"][0]["serial"] == "LAB1NV2R"
    assert changed_tasks(build(blank, "drive", *three("LAB1NV2R"))) == []
    plan = tmp_path / "teardown.json"
    planned = play(blank, "drive", "teardown", "--tags", "plan", "-e", f"plan_file={plan}")
    assert "volume `drive1` on drive `LAB1NV2R`" in planned
    play(blank, "drive", "teardown", "-e", f"apply_plan={plan}")
    left = (
        "for d in $(lsblk -dno NAME,SERIAL | grep LAB1NV | cut -d' ' -f1); do wipefs -n /dev/$d; done; "
        f"grep {POINT} /etc/fstab /proc/self/mountinfo; find /etc/systemd/system -name '*tunetool*'; "
        f"ls -d {POINT} /etc/tunetool/node.json /etc/tunetool/drives.json 2>/dev/null; true"
    )
    assert blank.ssh("node1", left) == ""


@pytest.mark.slow
def test_two_lost_drives_are_replaced_one_after_the_other(blank: Lab, tmp_path: Path) -> None:
    build(blank, "drive", *three("LAB1NV2"))
    sums = blank.ssh("node1", FILL + SUMS).splitlines()
    for serial in ("LAB1NV2", "LAB1NV3"):
        blank.lab("fault", "node1", "swap-drive", "--drive", serial)
    new = ("LAB1NV1", "LAB1NV2R", "LAB1NV3R")
    stays = "-e", json.dumps({"nvme_drives_count": 3, "nvme_drives_serials": list(new)})
    mine = f"cd {POINT}; sha256sum $(findmnt -rno TARGET | grep {POINT}/ | sed s,$,/data,) 2>/dev/null; true"
    plan = tmp_path / "first.json"
    planned = play(blank, "drive", "replace_drive", *stays, *SWAP, "--tags", "plan", "-e", f"plan_file={plan}")
    broken = "volume `drive2` is broken without `LAB1NV3`, and was left alone. hint: replace it next"
    assert broken in planned
    assert "keeps volume `drive0`" in row(planned, "LAB1NV1")
    done = play(blank, "drive", "replace_drive", *stays, *SWAP, "-e", f"apply_plan={plan}")
    assert broken in " ".join(done.split())
    manifest = json.loads(blank.ssh("node1", "cat /etc/tunetool/node.json"))
    of = {each["name"]: each["array"]["members"][0]["serial"] for each in manifest["volumes"]}
    assert of == {"drive0": "LAB1NV1", "drive1": "LAB1NV2R", "drive2": "LAB1NV3"}
    now = mounted(blank)
    assert (now[f"{POINT}/drive0"], now[f"{POINT}/drive1"]) == ("LAB1NV1", "LAB1NV2R")
    second = blank.ssh("node1", f"head -c 3M /dev/urandom > {POINT}/drive1/data; sync; sha256sum {POINT}/drive1/data")
    refused = blank.site(*groups_of("drive"), *stays)
    assert refused.code != 0
    assert "absent: `LAB1NV3`" in " ".join(refused.text.split())
    plan = tmp_path / "second.json"
    swap = (*stays, "-e", "replace_drive_old_serial=LAB1NV3", "-e", "replace_drive_new_serial=LAB1NV3R")
    play(blank, "drive", "replace_drive", *swap, "--tags", "plan", "-e", f"plan_file={plan}")
    done = play(blank, "drive", "replace_drive", *swap, "-e", f"apply_plan={plan}")
    assert "is broken" not in done
    assert mounted(blank) == {f"{POINT}/drive{at}": serial for at, serial in enumerate(new)}
    kept = [line.split()[0] for line in sums if "drive0" in line] + second.split()[:1]
    assert [line.split()[0] for line in blank.ssh("node1", mine).splitlines()] == kept
