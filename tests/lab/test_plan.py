"""Drives with data: only a plan that still fits allows to wipe them; a matching array is adopted with its data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import POINT, Lab, changed_tasks, checksums, row

pytestmark = pytest.mark.usefixtures("marker")

# $(dev LAB1NV5): the kernel name of a drive, now.
DEV = "dev() { lsblk -dno NAME,SERIAL | awk -v s=$1 '$2 == s {print \"/dev/\" $1}'; }; "


@pytest.fixture
def without_program(blank: Lab) -> Iterator[None]:
    """Other tests show the installation of the program; here it would only take time."""
    folder = blank.inventory / "host_vars"
    folder.mkdir()
    (folder / "node1.yml").write_text("tunetool_install: false\n")
    yield
    shutil.rmtree(folder)


@pytest.mark.slow  # four runs; what tells it from an array that waits for members: tests/unit/test_cut_off.py
def test_a_create_that_was_cut_off_is_given_up_by_a_plan(blank: Lab, tmp_path: Path) -> None:
    blank.ssh(
        "node1",
        DEV + "mdadm --create /dev/md/nvme_raid0 --run --level=0 --metadata=1.2 --name=nvme_raid0 --chunk=1024K"
        " --raid-devices=8 $(for n in 1 2 3 4 5 6 7 8; do dev LAB1NV$n; done) 2>&1 && udevadm settle"
        " && mdadm --stop /dev/md/nvme_raid0 2>&1 && udevadm settle"
        " && for n in 4 5 6 7 8; do mdadm --zero-superblock $(dev LAB1NV$n); done && udevadm settle"
        " && mount --bind /etc /etc && mount -o remount,bind,ro /etc",
    )
    before = checksums(blank)
    refused = blank.site("--tags", "drives")
    assert refused.code != 0
    assert "8 drives asked for, 5 usable" in refused.stdout
    assert "making its array was cut off: 3 of 8 members were written" in row(refused.stdout, "LAB1NV3")
    assert "`/etc/fstab`" in refused.stdout
    assert "cannot be written: `/etc` is read-only. hint: " in refused.stdout

    plan = tmp_path / "plan.json"
    closed = blank.site("--tags", "plan", "-e", f"plan_file={plan}")
    assert "array: refuse" in closed.stdout
    blank.ssh("node1", "umount /etc")
    planned = blank.site("--tags", "plan", "-e", f"plan_file={plan}")
    assert planned.code == 0, planned.text
    drives = json.loads(plan.read_text())["hosts"]["node1"]["drives"]
    assert [drive["serial"] for drive in drives if drive["action"] == "wipe"] == ["LAB1NV1", "LAB1NV2", "LAB1NV3"]
    assert checksums(blank) == before

    applied = blank.site("-e", f"apply_plan={plan}", "--tags", "drives,array")
    assert applied.code == 0, applied.text
    assert blank.ssh("node1", "cat /sys/block/md*/md/raid_disks /sys/block/md*/md/array_state").split() == [
        "8",
        "clean",
    ]


@pytest.mark.slow  # eight runs; plans are judged in tests/unit/test_plan.py and made over drives in molecule/default
@pytest.mark.usefixtures("without_program")
def test_data_is_given_up_only_by_a_plan_that_is_still_true(blank: Lab, tmp_path: Path) -> None:
    blank.lab("fault", "node1", "has-filesystem", "--drive", "LAB1NV2")
    blank.lab("fault", "node1", "has-partitions", "--drive", "LAB1NV4")
    blank.ssh(
        "node1",
        DEV + "mdadm --create /dev/md/old --run --level=0 --raid-devices=2 --chunk=512K $(dev LAB1NV5) $(dev LAB1NV6)"
        " 2>&1 && mkfs.ext4 -q /dev/md/old && udevadm settle",
    )
    before = checksums(blank)
    refused = blank.site()
    assert refused.code != 0
    assert "8 drives asked for, 4 usable" in refused.stdout
    assert "`tunetool provision --plan plan.json`" in " ".join(refused.stdout.split())

    plan = tmp_path / "plan.json"
    planned = blank.site("--tags", "plan", "-e", f"plan_file={plan}")
    assert planned.code == 0, planned.text
    assert "changed=0" in planned.stdout
    assert "  wipe  " in row(planned.stdout, "LAB1NV2")
    assert "mounted at `/srv/system`" in row(planned.stdout, "LAB1SYS")
    drives = json.loads(plan.read_text())["hosts"]["node1"]["drives"]
    doomed = {drive["serial"]: drive["holds"] for drive in drives if drive["action"] == "wipe"}
    assert list(doomed) == ["LAB1NV2", "LAB1NV4", "LAB1NV5", "LAB1NV6"]
    assert any("ext4" in text for text in doomed["LAB1NV5"])
    assert plan.stat().st_mode & 0o777 == 0o600

    edited = tmp_path / "edited.json"
    edited.write_text(plan.read_text().replace("LAB1NV4", "LAB1SYS"))
    stopped = blank.site("-e", f"apply_plan={edited}")
    assert stopped.code != 0
    assert "edited.json` was edited" in stopped.text.replace("\n", " ")
    assert "Choose the drives" not in stopped.stdout
    assert checksums(blank) == before

    blank.ssh("node1", DEV + "mount $(dev LAB1NV2) /mnt && echo new > /mnt/new && umount /mnt")
    before = checksums(blank)
    stale = blank.site("-e", f"apply_plan={plan}")
    assert stale.code != 0
    assert "its contents changed since" in row(stale.stdout, "LAB1NV2")
    assert "changed=0" in stale.stdout
    assert checksums(blank) == before

    again = blank.tool("provision", "-i", str(blank.inventory), "--plan", str(plan))
    assert again.code == 0, again.text
    assert "PLANNED" in again.stdout
    assert checksums(blank) == before
    applied = blank.tool("provision", "-i", str(blank.inventory), "--apply", str(plan))
    assert applied.code == 0, applied.text
    assert "BUILT" in applied.stdout
    assert "node1: Make or keep the array: changed" in applied.text
    assert blank.ssh("node1", f"findmnt -no FSTYPE {POINT}; cat /sys/block/md*/md/raid_disks").split() == ["xfs", "8"]


BY_HAND = (
    DEV + "mdadm --create /dev/md/data --run --level=0 --raid-devices=8 --chunk=1M"
    " $(for n in 1 2 3 4 5 6 7 8; do dev LAB1NV$n; done) 2>&1"
    " && mkfs.xfs -q -d su=1m,sw=8 -l su=256k /dev/md/data && mkdir -p /raid"
    " && mount -o noatime,logbufs=8,logbsize=256k /dev/md/data /raid && echo precious > /raid/file"
)
ADOPT = ("-e", "raid_array_adopt=true")
AT_RAID = ("-e", "scratch_filesystem_mount_point=/raid", "-e", "scratch_filesystem_offload_dir=/raid/offload")


@pytest.mark.slow
@pytest.mark.usefixtures("without_program")
def test_an_array_that_fits_is_adopted_with_its_data(blank: Lab) -> None:
    blank.ssh("node1", BY_HAND)
    refused = blank.site()
    assert refused.code != 0
    assert "raid_array_adopt" in refused.stdout
    elsewhere = blank.site(*ADOPT, "--tags", "drives,array,filesystem")
    assert elsewhere.code != 0
    assert f"is mounted at `/raid`, not at `{POINT}`" in " ".join(elsewhere.stdout.split())
    adopted = blank.site(*ADOPT, *AT_RAID)
    assert adopted.code == 0, adopted.text
    assert blank.ssh("node1", "cat /raid/file; findmnt -no SOURCE /raid").split()[0] == "precious"
    manifest = json.loads(blank.ssh("node1", "cat /etc/tunetool/node.json"))
    assert manifest["array"]["name"] == "data"
    assert manifest["filesystem"]["mount_point"] == "/raid"
    assert "ARRAY /dev/md/data " in blank.ssh("node1", "cat /etc/mdadm/mdadm.conf")
    again = blank.site(*ADOPT, *AT_RAID)
    assert again.code == 0, again.text
    assert changed_tasks(again.stdout) == []
    assert blank.ssh("node1", "cat /raid/file") == "precious"
