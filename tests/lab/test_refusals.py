"""Drives that are not blank, not alike or not there: refused, by serial, with nothing changed anywhere."""

from __future__ import annotations

import pytest
from conftest import Lab, checksums, row

pytestmark = pytest.mark.usefixtures("marker")


def refused(lab: Lab) -> str:
    """Run site.yml, which must refuse and leave every drive as it was."""
    before = checksums(lab)
    done = lab.site()
    assert done.code != 0
    assert "changed=0" in done.stdout
    assert checksums(lab) == before
    assert lab.ssh("node1", "ls /etc/tunetool 2>/dev/null; grep -c ARRAY /etc/mdadm/mdadm.conf; true") in ("0", "2")
    return done.stdout


def test_four_faults_at_once_are_four_reasons(blank: Lab) -> None:
    for kind, serial in (
        ("has-filesystem", "LAB1NV2"),
        ("has-partitions", "LAB1NV4"),
        ("in-use", "LAB1NV6"),
        ("mixed-size", "LAB1NV7"),
    ):
        blank.lab("fault", "node1", kind, "--drive", serial)
    output = refused(blank)
    assert "8 drives asked for, 4 usable" in output
    assert "holds ext4" in row(output, "LAB1NV2")
    assert "gpt" in row(output, "LAB1NV4") or "partitions" in row(output, "LAB1NV4")
    assert "mounted at `/mnt/in-use`" in row(output, "LAB1NV6")
    assert "size 2 GiB is not 4 GiB" in row(output, "LAB1NV7")
    assert "mounted at `/srv/system`" in row(output, "LAB1SYS")
    assert "blank" in row(output, "LAB1NV1")


def test_seven_drives_are_not_eight(blank: Lab) -> None:
    blank.lab("fault", "node1", "remove-drive", "--drive", "LAB1NV1")
    output = refused(blank)
    assert "8 drives asked for, 7 usable" in output
    assert "LAB1NV1" not in "".join(line for line in output.splitlines() if "nvme" in line and "take" in line)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["has-filesystem", "has-partitions", "in-use", "mixed-size", "remove-drive"])
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
    # Into the rebuild of the initramfs, the longest step: its module goes on by itself on the node.
    cut = blank.run("timeout", "-s", "INT", "30", "ansible-playbook", "site.yml", "-i", str(blank.inventory))
    assert cut.code != 0
    done = blank.site()
    assert done.code == 0, done.text
    assert "changed=0" in blank.site().stdout
