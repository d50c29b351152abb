"""A built node that somebody changed: each difference is named, mended if no data is at risk, and never rebuilt."""

from __future__ import annotations

import json

import pytest
from conftest import POINT, Done, Lab, changed_tasks

pytestmark = pytest.mark.usefixtures("marker")

UNIT = "slurmd.service"  # named now, and not when the node was built
# The program's installation is shown elsewhere; here it would only take time.
ASKED = ("-e", json.dumps({"scratch_filesystem_services": [UNIT], "tunetool_install": False}))
DATA = f"{POINT}/deepspeed_offload/data"

BREAK = f"""set -e
mount --options-mode ignore -o remount,relatime {POINT}
sed -i 's/,nofail//' /etc/fstab
echo 0 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages
mount -o remount,size=64M /dev/shm
xfs_io -c 'label -s other' {POINT}
sed -i '/^ARRAY .*nvme_raid0/d' /etc/mdadm/mdadm.conf
rm /etc/security/limits.d/60-tunetool-memlock.conf
chmod 0700 {POINT}/deepspeed_offload
mkdir /tmp/beneath && mount --bind / /tmp/beneath && chattr -i /tmp/beneath{POINT}
umount /tmp/beneath && rmdir /tmp/beneath"""

MENDED = {
    "mount.options": ("noatime", "relatime"),
    f"fstab[{POINT}]": None,
    "memory.hugepages[2MiB]": ("64 pages", "0 pages"),
    "memory.shm": ("512 MiB", "64 MiB"),
    "memory.memlock[limits.d]": None,
    "filesystem.label": ("`nvme_raid0`", "`other`"),
    "mdadm.conf": None,
    "initramfs": None,
    f"services[{UNIT}]": None,
    "offload.directory": ("root:root 1777", "root:root 0700"),
    "mount.bare": ("immutable", "writable"),
}


@pytest.fixture
def node(built: Lab) -> Lab:
    """A built node with a file that every test must leave intact."""
    built.ssh("node1", f"head -c 3M /dev/urandom > {DATA} && sync")
    return built


def checksum(lab: Lab) -> str:
    """Checksum of the file, read from the drives."""
    return lab.ssh("node1", f"echo 3 > /proc/sys/vm/drop_caches; sha256sum {DATA}")


def verbose(lab: Lab, *arguments: str) -> Done:
    """site.yml with its results as JSON."""
    command = ("ansible-playbook", "site.yml", "-i", str(lab.inventory), *ASKED, "-v", *arguments)
    return lab.run("env", "ANSIBLE_CALLBACK_RESULT_FORMAT=json", *command)


def differences(output: str) -> dict[str, dict[str, object]]:
    """Differences by name, from the results that ``-v`` prints as JSON."""
    by_name: dict[str, dict[str, object]] = {}
    for line in output.splitlines():
        if "=> {" in line and '"differences"' in line:
            result = json.loads(line[line.index("{") :])
            by_name.update({difference["name"]: difference for difference in result["differences"]})
    return by_name


@pytest.mark.slow
def test_what_can_be_mended_is_named_and_mended_beside_the_data(node: Lab) -> None:
    before = checksum(node)
    node.ssh("node1", BREAK)
    looked = differences(verbose(node, "--check").stdout)
    done = verbose(node)
    assert done.code == 0, done.text
    by_name = differences(done.stdout)
    assert set(by_name) == set(MENDED)
    for name, values in MENDED.items():
        assert by_name[name]["mended"] is True
        if values:
            assert (by_name[name]["expected"], by_name[name]["found"]) == values
    assert looked == by_name
    text = node.ssh(
        "node1",
        f"findmnt -no OPTIONS {POINT}; findmnt -no LABEL {POINT}; findmnt -bno SIZE /dev/shm; ls -ld {POINT}/*;"
        " cat /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages; grep -c nofail /etc/fstab",
    )
    assert "noatime" in text
    assert "drwxrwxrwt" in text
    assert [line for line in text.splitlines() if line in ("nvme_raid0", str(512 * 2**20), "64", "1")] == [
        "nvme_raid0",
        str(512 * 2**20),
        "64",
        "1",
    ]
    again = verbose(node)
    assert changed_tasks(again.stdout) == []
    assert "changed=0" in again.stdout
    assert differences(again.stdout) == {}
    assert checksum(node) == before


@pytest.mark.slow
def test_what_cannot_be_mended_stops_the_run_and_is_all_named(node: Lab) -> None:
    before = checksum(node)
    node.ssh("node1", "echo 0 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
    wrong = {
        "raid_array_chunk": "512KiB",
        "scratch_filesystem_mount_options": ["noatime", "logbufs=4", "logbsize=256k"],
    }
    done = node.site(*ASKED, "-e", json.dumps(wrong))
    assert done.code != 0
    assert "changed=0" in done.stdout
    said = " ".join(done.text.split())
    assert "`array.chunk`: expected 512 KiB, found 1 MiB. hint:" in said
    assert "`mount.options`: expected logbufs=4, found logbufs=8. hint:" in said
    assert f"`umount {POINT}`" in said
    assert "`memory.hugepages[2MiB]`: expected 64 pages, found 0 pages. hint:" in said
    assert node.ssh("node1", "cat /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages") == "0"
    assert checksum(node) == before
    # Unmounted by its owner, the volume takes the options at the next run.
    node.ssh("node1", f"umount {POINT}")
    del wrong["raid_array_chunk"]
    assert node.site(*ASKED, "-e", json.dumps(wrong)).code == 0
    assert "logbufs=4" in node.ssh("node1", f"findmnt -no OPTIONS {POINT}")
    assert checksum(node) == before


def refused(node: Lab, *differing: str) -> str:
    """Assert that the run stops at these differences and changes nothing. Returns the checksum of the file on the volume."""
    before = checksum(node)
    done = node.site(*ASKED)
    assert done.code != 0
    said = " ".join(done.text.split())
    for name in differing:
        assert f"`{name}`: expected" in said
    assert "changed=0" in done.stdout
    assert checksum(node) == before
    return before


@pytest.mark.slow
def test_what_somebody_made_anew_is_refused_until_it_is_adopted(node: Lab) -> None:
    node.ssh(
        "node1",
        f"umount {POINT}; mkfs.xfs -q -f -d su=512k,sw=8 /dev/md/nvme_raid0"
        f" && mount /dev/md/nvme_raid0 {POINT} && mkdir {POINT}/deepspeed_offload && echo theirs > {DATA} && udevadm settle",
    )
    refused(node, "filesystem.uuid", "filesystem.data_stripe_unit")
    drives = "$(for n in 1 2 3 4 5 6 7 8; do lsblk -dno NAME,SERIAL | awk -v s=LAB1NV$n '$2 == s {print \"/dev/\" $1}'; done)"
    node.ssh(
        "node1",
        f'umount {POINT} && members="{drives}" && mdadm --stop /dev/md/nvme_raid0 2>&1'
        " && mdadm --zero-superblock $members && mdadm --create /dev/md/nvme_raid0 --run --level=0 --metadata=1.2"
        " --name=nvme_raid0 --chunk=1M --raid-devices=8 $members 2>&1 && udevadm settle"
        " && mkfs.xfs -q -f -d su=1m,sw=8 -l su=256k /dev/md/nvme_raid0 && udevadm settle"
        f" && mount -o noatime,logbufs=8,logbsize=256k /dev/md/nvme_raid0 {POINT}"
        f" && mkdir {POINT}/deepspeed_offload && echo theirs > {DATA}",
    )
    before = refused(node, "array.uuid", "filesystem.uuid")
    adopted = node.site(*ASKED, "-e", "raid_array_adopt=true")
    assert adopted.code == 0, adopted.text
    assert checksum(node) == before
