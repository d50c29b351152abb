"""Ephemeral mode: after a stop and start local drives are blank, nearly blank, or unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from conftest import POINT, Lab, changed_tasks, checksums

pytestmark = pytest.mark.usefixtures("marker")

UNIT = "tunetool-ephemeral.service"
SERVICE = "scratch-user.service"
INSTALL = f"""printf '[Service]\\nType=oneshot\\nRemainAfterExit=yes\\nExecStart=/usr/bin/touch {POINT}/started\\n[Install]
WantedBy=multi-user.target\\n' > /etc/systemd/system/{SERVICE}; systemctl enable {SERVICE}"""
WANTED = json.dumps(
    {
        "ephemeral_enabled": True,
        "ephemeral_wait_seconds": 5,
        "scratch_filesystem_services": [SERVICE],
        "scratch_filesystem_offload_group": "daemon",
        "scratch_filesystem_offload_mode": "2770",
    }
)
VERIFY = "/opt/tunetool/bin/tunetool verify --level config --runs-dir /tmp/runs"
# The drives as they are after a stop and start of which one drive knows nothing: seven blank, one with a file system.
ONE_HOLDS_DATA = f"""set -e; systemctl stop {SERVICE}; umount {POINT}; mdadm --stop /dev/md/nvme_raid0 2>&1
for drive in $(lsblk -dno NAME,SERIAL | awk '/LAB.N/ {{print "/dev/" $1}}'); do
    mdadm --zero-superblock $drive; wipefs -aq $drive; done
mkfs.ext4 -q $(lsblk -dno NAME,SERIAL | awk '$2 ~ /N.3$/ {{print "/dev/" $1}}'); sync"""


@pytest.fixture(scope="module")
def cloud(built_once: Lab) -> Iterator[Lab]:
    """A node in ephemeral mode, with a service that needs the volume."""
    built_once.reset("node1", "--to", "built")
    built_once.ssh("node1", INSTALL)
    # Check mode says the same of this role and writes nothing. The service and the directory are the volume's, and the
    # manifest names the directory's group and mode.
    for roles, arguments in (
        (["ephemeral"], ["--check", "--tags", "always,ephemeral"]),
        (["scratch_filesystem", "tunetool", "ephemeral"], []),
    ):
        done = built_once.site("-e", WANTED, *arguments)
        assert done.code == 0, done.text
        assert [name.split(" : ")[0].rpartition(".")[2] for name in changed_tasks(done.stdout)] == roles
    assert built_once.ssh("node1", f"systemctl is-active {UNIT}") == "active"
    yield built_once
    built_once.reset("node1")


def identity(lab: Lab) -> str:
    """The identifiers of the volume in fstab, mdadm.conf and the initramfs."""
    return lab.ssh(
        "node1",
        f"mdadm --detail /dev/md/nvme_raid0 | grep -E 'UUID|Chunk|Raid Devices'; findmnt -no UUID,OPTIONS {POINT}; "
        f"xfs_info {POINT} | grep -E 'sunit|swidth'; grep -h nvme_raid0 /etc/fstab /etc/mdadm/mdadm.conf",
    )


def journal(lab: Lab) -> str:
    """The unit's messages in this boot, one per line."""
    return lab.ssh("node1", f"journalctl -b --no-pager --no-hostname -o short-monotonic -u {UNIT}")


def start_times(lab: Lab, *units: str) -> list[int]:
    """When each unit became active, in microseconds since the boot."""
    text = lab.ssh("node1", f"systemctl show -p ActiveEnterTimestampMonotonic --value {' '.join(units)}")
    return [int(line) for line in text.split()]


@pytest.mark.slow
def test_drives_that_come_back_blank_are_built_before_use(cloud: Lab) -> None:
    before = identity(cloud)
    members = cloud.ssh("node1", "grep serial /etc/tunetool/node.json")
    cloud.ssh("node1", f"touch {POINT}/lost")
    cloud.reboot("node1", "--blank-drives", "--new-serials")
    cloud.ssh("node1", f"timeout 100 systemctl start {SERVICE}")
    assert "all 8 drives are blank" in journal(cloud)
    assert identity(cloud) == before
    assert cloud.ssh("node1", f"ls {POINT}; stat -c '%U %G %a' {POINT}/deepspeed_offload") == (
        "deepspeed_offload\nstarted\nroot daemon 2770"
    )
    times = start_times(cloud, UNIT, "mnt-nvme_raid0.mount", SERVICE)
    assert 0 not in times
    assert times == sorted(times)
    after = cloud.ssh("node1", "grep serial /etc/tunetool/node.json")
    assert after == members.replace("LAB1NV", "LAB1NW")
    cloud.ssh("node1", f"{VERIFY}; test ! -e /etc/tunetool/ephemeral.begun")
    again = cloud.site("-e", WANTED)
    assert again.code == 0, again.text
    assert "changed=0" in again.stdout


@pytest.mark.slow
def test_a_plain_reboot_changes_nothing(cloud: Lab) -> None:
    cloud.ssh("node1", f"echo kept > {POINT}/kept; sync")
    before = cloud.ssh("node1", "md5sum /etc/tunetool/* /etc/fstab /etc/mdadm/mdadm.conf")
    cloud.reboot("node1")
    cloud.ssh("node1", f"timeout 100 systemctl start {SERVICE}")
    assert "nothing to do" in journal(cloud)
    assert cloud.ssh("node1", f"cat {POINT}/kept") == "kept"
    assert cloud.ssh("node1", "md5sum /etc/tunetool/* /etc/fstab /etc/mdadm/mdadm.conf") == before
    # A configuration that cannot be read is no reason to build.
    broken = "cd /etc/tunetool; cp ephemeral.json kept; echo '{}' > ephemeral.json; tunetool ephemeral-rebuild 2>&1; echo $?; mv kept ephemeral.json"
    lines = cloud.ssh("node1", broken).splitlines()
    assert (lines[0], lines[-1]) == (
        "error: `/etc/tunetool/ephemeral.json`: configuration.schema is missing",
        "2",
    )
    without = json.dumps({"ephemeral_enabled": True, "tunetool_install": False})
    refused = cloud.site("-e", without, "--tags", "always,ephemeral")
    assert refused.code != 0
    assert "needs the program on the node. hint: set `tunetool_install: true`" in refused.stdout


@pytest.mark.slow
def test_a_rebuild_that_was_cut_off_is_finished_by_the_next_boot(cloud: Lab) -> None:
    before = identity(cloud)
    # The state after a power cut during mkfs.xfs: the superblock says that the file system is incomplete.
    cut = f"""set -e; systemctl stop {SERVICE}; umount {POINT}
    printf '\\1' | dd of=/dev/md/nvme_raid0 bs=1 seek=126 conv=notrunc status=none
    python3 -c 'import json; print(json.load(open("/etc/tunetool/node.json"))["array"]["uuid"])' \
    > /etc/tunetool/ephemeral.begun; sync"""
    cloud.ssh("node1", cut)
    cloud.reboot("node1", "--power-loss")
    cloud.ssh("node1", f"timeout 100 systemctl start {SERVICE}")
    assert "was cut off: going on" in journal(cloud)
    assert identity(cloud) == before
    cloud.ssh("node1", f"{VERIFY}; test ! -e /etc/tunetool/ephemeral.begun")


@pytest.mark.slow
def test_one_drive_that_holds_data_stops_it_and_the_boot_goes_on(cloud: Lab) -> None:
    cloud.ssh("node1", ONE_HOLDS_DATA)
    before = checksums(cloud)
    cloud.reboot("node1")
    state = cloud.ssh(
        "node1",
        f"systemctl is-system-running --wait; systemctl is-active sshd {UNIT} mnt-nvme_raid0.mount {SERVICE}; "
        f"systemctl is-active {SERVICE} || true",
    )
    assert state.split() == ["degraded", "active", "failed", "inactive", "inactive", "inactive"]
    (line,) = [line for line in journal(cloud).splitlines() if "nothing was written" in line]
    assert re.search(r"7 usable; `LAB1N.3` \(nvme\dn1\) holds ext4 .*hint: run `tunetool provision`", line)
    assert "LAB1SYS" not in line
    # systemctl shows it with the failed units.
    assert "holds ext4" in cloud.ssh("node1", f"systemctl status --no-pager -l {UNIT} || true")
    assert checksums(cloud) == before
    # Started again, it runs again and reports it; it never counts as successful.
    again = cloud.site("-e", WANTED, "--tags", "always,ephemeral")
    assert again.code != 0
    assert f"hint: see `systemctl status {UNIT}`" in again.stdout
    assert checksums(cloud) == before
    # Switched off again: nothing of it remains, whatever state the volume is in.
    off = cloud.site("-e", '{"ephemeral_enabled": false}', "--tags", "always,ephemeral")
    assert off.code == 0, off.text
    left = cloud.ssh("node1", "ls /etc/tunetool; find /etc/systemd -name '*tunetool-ephemeral*'; systemctl --failed")
    # The first is the role io_tuning's.
    assert left.split()[:2] == ["io-tuning.json", "node.json"]
    assert "tunetool-ephemeral" not in left
