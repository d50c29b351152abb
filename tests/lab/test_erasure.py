"""A teardown erases for good what its plan names, and refuses before it changes anything what cannot be erased so."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Done, Lab, checksums

pytestmark = pytest.mark.usefixtures("marker")

DEV = "dev() { lsblk -dno NAME,SERIAL | awk -v s=$1 '$2 == s {print \"/dev/\" $1}'; }; "
FILLED = f"""{DEV} set -e
mdadm --create /dev/md/nvme_raid0 --run --level=0 --raid-devices=2 --name=nvme_raid0 --homehost=any \
$(dev LAB1NV1) $(dev LAB1NV2) >&2
mkfs.xfs -q -K /dev/md/nvme_raid0; mkdir -p /mnt/nvme_raid0; mount /dev/md/nvme_raid0 /mnt/nvme_raid0
head -c 64M /dev/urandom > /mnt/nvme_raid0/data; for n in $(seq 24); do cp /mnt/nvme_raid0/data /mnt/nvme_raid0/$n; done
sync"""
ZEROS = (
    DEV
    + "for n in 1 2; do cmp -n $(blockdev --getsize64 $(dev LAB1NV$n)) $(dev LAB1NV$n) /dev/zero && echo zeros; done"
)


def play(lab: Lab, *arguments: str) -> Done:
    return lab.run("ansible-playbook", "playbooks/teardown.yml", "-i", str(lab.inventory), *arguments)


@pytest.mark.slow
def test_a_teardown_discards_what_its_plan_names(blank: Lab, tmp_path: Path) -> None:
    blank.ssh("node1", FILLED)
    before = checksums(blank)
    plan = str(tmp_path / "plan.json")
    # QEMU's controller has neither.
    refused = play(blank, "--tags", "plan", "-e", f"plan_file={plan}", "-e", "teardown_erase=crypto")
    assert refused.code == 0, refused.text
    text = " ".join(refused.text.split())
    for serial in ("LAB1NV1", "LAB1NV2"):
        assert f"drive `{serial}`" in text
    assert "cannot be erased by `teardown_erase: crypto`: its controller offers cryptographic erase neither by" in text
    planned = play(blank, "--tags", "plan", "-e", f"plan_file={plan}", "-e", "teardown_erase=discard")
    assert planned.code == 0, planned.text
    assert "discard; discarded blocks read as bytes 0x00" in planned.stdout
    other = play(blank, "-e", f"apply_plan={plan}")
    assert other.code != 0
    assert "it has `teardown_erase: discard`, this run `none`" in " ".join(other.text.split())
    apply = ("-e", f"apply_plan={plan}", "-e", "teardown_erase=discard")
    preview = play(blank, *apply, "--check", "--diff")
    assert preview.code == 0, preview.text
    assert "LAB1NV2: discard" in preview.stdout
    assert checksums(blank) == before

    # As a run leaves it that was cut between the first drive and the second.
    blank.ssh(
        "node1", DEV + "umount /mnt/nvme_raid0 && mdadm --stop /dev/md/nvme_raid0 && blkdiscard -f $(dev LAB1NV1)"
    )
    done = play(blank, *apply)
    assert done.code == 0, done.text
    assert blank.ssh("node1", ZEROS).split() == ["zeros", "zeros"]
    again = play(blank, *apply)
    assert again.code == 0, again.text
    assert "changed=0" in again.stdout
