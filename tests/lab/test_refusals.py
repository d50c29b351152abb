"""Drives that are not blank, not alike or missing: they are refused by serial, and nothing is changed.

A refused run costs ten seconds and a reset three, so every run carries as many faults as it can.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import POINT, ROOT, Lab, changed_tasks, row

pytestmark = pytest.mark.usefixtures("marker")

# $(dev LAB1NV5): the kernel name of a drive, now.
DEV = "dev() { lsblk -dno NAME,SERIAL | awk -v s=$1 '$2 == s {print \"/dev/\" $1}'; }; "
BLOCK = 2**20


def fingerprints(lab: Lab) -> dict[str, str]:
    """Checksum of every data drive by serial, from the files behind the drives, after the node's sync."""
    lab.ssh("node1", "sync")
    digests = {}
    for path in sorted((lab.state / "node1/drives").glob("LAB1NV*.img")):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            for block in data_blocks(path):
                file.seek(block)
                data = file.read(BLOCK)
                # Whether zeros are stored or left out says nothing about the drive.
                if data.strip(b"\0"):
                    digest.update(b"%d:" % block + data)
        digests[path.stem] = digest.hexdigest()
    return digests


def data_blocks(path: Path) -> list[int]:
    """Offsets of the blocks of a sparse file that have data."""
    blocks, end = set(), path.stat().st_size
    handle = os.open(path, os.O_RDONLY)
    try:
        offset = 0
        while offset < end:
            try:
                start = os.lseek(handle, offset, os.SEEK_DATA)
            except OSError:
                break
            offset = os.lseek(handle, start, os.SEEK_HOLE)
            blocks.update(range(start // BLOCK, -(-offset // BLOCK)))
    finally:
        os.close(handle)
    return [number * BLOCK for number in sorted(blocks)]


FILES = "sha256sum /etc/mdadm/mdadm.conf /etc/fstab; find /etc/tunetool /opt/tunetool -type f 2>/dev/null | sort"


def refused(lab: Lab) -> str:
    """Run site.yml, which must refuse and leave every drive and every file of the node as it was."""
    before = fingerprints(lab), lab.ssh("node1", FILES)
    done = lab.site()
    assert done.code != 0
    assert "changed=0" in done.stdout
    assert (fingerprints(lab), lab.ssh("node1", FILES)) == before
    return done.stdout


def test_whatever_others_left_is_refused_by_name(blank: Lab) -> None:
    for kind, serial in (
        ("lvm", "LAB1NV1"),
        ("lvm-idle", "LAB1NV2"),
        ("zfs-label", "LAB1NV3"),
        ("btrfs-in-use", "LAB1NV4"),
        ("luks", "LAB1NV6"),
        ("swap-signature", "LAB1NV7"),
        ("partition-in-use", "LAB1NV8"),
    ):
        blank.lab("fault", "node1", kind, "--drive", serial)
    # A second member of the mounted btrfs: no mount names it.
    blank.ssh(
        "node1",
        DEV + "mount -o remount,rw /mnt/btrfs && btrfs device add -f $(dev LAB1NV5) /mnt/btrfs"
        " && mount -o remount,ro /mnt/btrfs",
    )
    output = refused(blank)
    assert "8 drives asked for, 0 usable" in output
    for serial, reason in (
        ("LAB1NV1", "member of `dm-0`"),
        ("LAB1NV2", "holds LVM2_member"),
        ("LAB1NV3", "holds zfs_member"),
        ("LAB1NV4", "mounted at `/mnt/btrfs`"),
        ("LAB1NV5", "mounted at `/mnt/btrfs`"),
        ("LAB1NV6", "holds crypto_LUKS"),
        ("LAB1NV7", "holds swap"),
        ("LAB1NV8", "mounted at `/mnt/partition-in-use` (partition nvme"),
        ("LAB1SYS", "mounted at `/srv/system`"),
    ):
        assert reason in row(output, serial)
        assert "  refuse  " in row(output, serial)


WITHOUT_LABELS = (
    DEV
    + """
tar -cf - /etc 2>/dev/null | dd of=$(dev LAB1NV1) bs=64k conv=fsync status=none
head -c 200000 /dev/urandom | dd of=$(dev LAB1NV2) bs=64k conv=fsync status=none
printf kept | dd of=$(dev LAB1NV3) bs=1 seek=700000 conv=fsync status=none
printf kept | dd of=$(dev LAB1NV4) bs=1 seek=$(($(blockdev --getsize64 $(dev LAB1NV4)) - 5000)) conv=fsync status=none
losetup /dev/loop5 $(dev LAB1NV5)
dmsetup create somebody --table "0 8192 linear $(dev LAB1NV6) 0"
cp -a $(dev LAB1NV7) /root/guest-disk
for serial in 7:/root/guest-disk 8:$(dev LAB1NV8); do
  setsid python3 -c 'import os, sys, time; os.open(sys.argv[1], os.O_RDWR); time.sleep(3600)' ${serial#*:} >/dev/null 2>&1 </dev/null &
done
n=0; until [ $(ls -l /proc/*/fd 2>/dev/null | grep -c -e guest-disk -e "$(dev LAB1NV8)$") = 2 ]; do n=$((n+1)); [ $n -lt 100 ] || exit 1; sleep 0.2; done
rm /root/guest-disk; sync; udevadm settle
"""
)


def test_what_no_label_shows_is_refused_by_name(blank: Lab) -> None:
    blank.ssh("node1", WITHOUT_LABELS)
    output = refused(blank)
    assert "8 drives asked for, 0 usable" in output
    for serial, reason in (
        ("LAB1NV1", "holds data without a label at 0 B"),
        ("LAB1NV2", "holds data without a label at 0 B"),
        ("LAB1NV3", "holds data without a label at "),
        ("LAB1NV4", "holds data without a label at "),
        ("LAB1NV5", "in use: loop device `loop5` lies on it"),
        ("LAB1NV6", "member of `dm-0`"),
        ("LAB1NV7", "`python3` has it open"),
        ("LAB1NV8", "`python3` has it open"),
    ):
        assert reason in row(output, serial)
        assert "  refuse  " in row(output, serial)


def test_whatever_a_drive_is_is_refused_by_name(blank: Lab) -> None:
    for kind, serial in (
        ("has-filesystem", "LAB1NV2"),
        ("has-partitions", "LAB1NV3"),
        ("in-use", "LAB1NV4"),
        ("mixed-size", "LAB1NV5"),
        ("metadata", "LAB1NV6"),
        ("duplicate-serial", "LAB1NV7"),
        ("empty-serial", "LAB1NV8"),
    ):
        blank.lab("fault", "node1", kind, "--drive", serial)
    output = refused(blank)
    assert "8 drives asked for, 0 usable" in output
    assert "holds ext4" in row(output, "LAB1NV2")
    assert "gpt" in row(output, "LAB1NV3")
    assert "mounted at `/mnt/in-use`" in row(output, "LAB1NV4")
    assert "size 2 GiB is not 4 GiB" in row(output, "LAB1NV5")
    assert "is formatted with 8 metadata bytes per block" in row(output, "LAB1NV6")
    assert "has no serial number" in output
    # Nothing but a blank at the end of their subsystems' names tells the two from two paths to one drive.
    same = "refuse   serial `LAB1NV1` is on 2 drives, which may be paths to one"
    assert len(re.findall(rf"^nvme\dn1 .*{same}", output, re.MULTILINE)) == 2


@pytest.mark.slow
def test_the_printed_lines_mend_odd_blocks_if_the_count_is_right(blank: Lab) -> None:
    newer = '{"schema": "tunetool.manifest/3", "array": {}}'
    blank.ssh("node1", f"mkdir -p /etc/tunetool && echo '{newer}' > /etc/tunetool/node.json")
    output = refused(blank)
    assert "newer than this version" in output
    assert "Install packages" not in output
    blank.ssh("node1", "rm -r /etc/tunetool")

    blank.lab("fault", "node1", "extra-drive")
    blank.lab("fault", "node1", "4k-sectors", "--drive", "LAB1NV3")
    blank.lab("fault", "node1", "metadata", "--drive", "LAB1NV5")
    output = refused(blank)
    assert "the drives are not alike: `LAB1NV3`" in output
    assert "logical block of 4096 bytes, the others' have 512" in row(output, "LAB1NV3")
    assert "is formatted with 8 metadata bytes per block" in row(output, "LAB1NV5")
    for serial in ("LAB1NV3", "LAB1NV5"):
        line = re.search(r"`(nvme format /dev/\S+ --lbaf=\d+)` mends it", row(output, serial))
        assert line is not None, row(output, serial)
        blank.ssh("node1", line[1] + " --force && udevadm settle")

    # Nine drives show that both are whole again.
    output = refused(blank)
    assert "8 drives asked for, 9 match" in output
    for serial in ("LAB1NV3", "LAB1NV5"):
        blank.lab("fault", "node1", "remove-drive", "--drive", serial)
    output = refused(blank)
    assert "8 drives asked for, 7 usable" in output
    assert "LAB1NV3" not in output


NAMES = "lsblk -dno SERIAL,NAME | grep NV | sort"


@pytest.mark.slow
def test_names_that_moved_to_other_drives_change_nothing_else(built: Lab) -> None:
    before = built.ssh("node1", NAMES)
    built.reboot("node1", "--shuffle")
    assert built.ssh("node1", NAMES) != before
    done = built.site()
    assert done.code == 0, done.text
    # Each drive is in another slot, and the manifest has the slots' addresses.
    assert changed_tasks(done.stdout) == ["tunetool.node.tunetool : Write the manifest and check the node against it"]
    verified = built.verify("--level", "config")
    assert verified.code == 0, verified.text
    assert changed_tasks(built.site().stdout) == []


OLD_FSTAB = f"UUID=00000000-dead-beef-0000-000000000000 {POINT} ext4 nofail 0 2"
FOREIGN_ARRAY = "ARRAY /dev/md/vendor metadata=1.2 UUID=01234567:89abcdef:01234567:89abcdef"


@pytest.mark.slow
def test_drives_of_4096_are_built_over_what_files_already_said(blank: Lab) -> None:
    for number in range(1, 9):
        blank.lab("fault", "node1", "4k-sectors", "--drive", f"LAB1NV{number}")
    blank.ssh(
        "node1",
        f"mkdir -p {POINT}; touch {POINT}/lost; echo '{OLD_FSTAB}' >> /etc/fstab; echo '{FOREIGN_ARRAY}' >> /etc/mdadm/mdadm.conf; systemctl daemon-reload;"
        " mkdir -p /etc/tunetool; printf '\\377{\"schema\": ' > /etc/tunetool/node.json",
    )
    # A line of somebody else for the mount point is not replaced, and is reported before a drive is touched.
    refused = blank.site()
    assert refused.code != 0
    assert "/etc/fstab line" in refused.text
    assert "choose another `scratch_filesystem_mount_point`" in " ".join(refused.text.split())
    # What the mount would hide is reported in the same message.
    assert "holds 1 entry: `lost`, which the mount would hide" in " ".join(refused.text.split())
    assert blank.ssh("node1", "ls /dev/md 2>/dev/null; blkid -o device | grep -c nvme").split() == ["1"]
    blank.ssh("node1", f"rm {POINT}/lost; sed -i /dead-beef/d /etc/fstab; systemctl daemon-reload")
    done = blank.site()
    assert done.code == 0, done.text
    assert "`/etc/tunetool/node.json` is not JSON: it is not UTF-8" in " ".join(done.text.split())
    assert '"schema": "tunetool.manifest/1"' in blank.ssh("node1", "cat /etc/tunetool/node.json")
    assert "sectsz=4096" in blank.ssh("node1", f"xfs_info {POINT}")
    entries = blank.ssh("node1", f"grep {POINT} /etc/fstab").splitlines()
    assert len(entries) == 1
    assert " xfs " in entries[0]
    conf = blank.ssh("node1", "grep ^ARRAY /etc/mdadm/mdadm.conf").splitlines()
    assert FOREIGN_ARRAY in conf
    assert len(conf) == 2
    verified = blank.verify("--expect", "read=1MBps", "--duration", "2s")
    assert verified.code == 0, verified.text
    again = blank.site()
    assert again.code == 0, again.text
    assert changed_tasks(again.stdout) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["has-filesystem", "btrfs", "luks", "empty-serial", "mixed-size", "remove-drive"])
def test_each_fault_alone_is_refused(blank: Lab, kind: str) -> None:
    blank.lab("fault", "node1", kind, "--drive", "LAB1NV3")
    assert "8 drives asked for, 7 usable" in refused(blank)


@pytest.mark.slow
def test_the_manifest_is_written_without_the_program(blank: Lab) -> None:
    done = blank.site("-e", "tunetool_install=false")
    assert done.code == 0, done.text
    assert '"schema": "tunetool.manifest/1"' in blank.ssh("node1", "cat /etc/tunetool/node.json")
    assert blank.ssh("node1", "ls -d /opt/tunetool /usr/local/bin/tunetool 2>/dev/null; true") == ""


@pytest.mark.slow
def test_a_run_that_was_cut_is_simply_run_again(blank: Lab) -> None:
    # During the rebuild of the initramfs, the longest step: its module continues on the node.
    with subprocess.Popen(
        ["ansible-playbook", "site.yml", "-i", str(blank.inventory)],
        cwd=ROOT,
        env=blank.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as running:
        blank.ssh("node1", "n=0; until pgrep -x mkinitramfs; do n=$((n+1)); [ $n -lt 9000 ] || exit 1; sleep 0.1; done")
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait() != 0
    done = blank.site()
    assert done.code == 0, done.text
    assert "changed=0" in blank.site().stdout
