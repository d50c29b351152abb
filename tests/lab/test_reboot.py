"""1 GiB pages, from the inventory through the boot loader and one reboot to the pages, and back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import POINT, Lab, changed_tasks, started

PAGES = "/sys/devices/system/node/node1/hugepages/hugepages-1048576kB/nr_hugepages"
LINUX = "grep /vmlinuz /boot/grub/grub.cfg"
WORDS = "hugepagesz=1G hugepages=1:1"
# A node of 4 GiB: one page is more than half of what NUMA node 1 has.
ASKED = {"host_memory_hugepages": [{"size": "1GiB", "count": 1, "numa_node": 1}], "host_memory_hugepages_max_share": 60}
# So much memory is taken that the kernel cannot form a page of 1 GiB; the boot frees it.
FILL = "mkdir -p /run/fill && mount -t tmpfs -o size=3g tmpfs /run/fill && fallocate -l 2900M /run/fill/all"


@pytest.fixture
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A separate lab with a node of 4 GiB: nodes of other tests are too small for a page."""
    with started(tmp_path_factory, "--memory", "4GiB", "--os", os.environ.get("TUNETOOL_LAB_OS", "debian12")) as lab:
        yield lab


def asked(**more: Any) -> tuple[str, str]:
    return "-e", json.dumps({**ASKED, **more})


def boot_id(lab: Lab) -> str:
    return lab.ssh("node1", "cat /proc/sys/kernel/random/boot_id")


def reboot_required(lab: Lab) -> bool:
    manifest = json.loads(lab.ssh("node1", "cat /etc/tunetool/node.json"))
    return bool(manifest["reboot_required"])


@pytest.mark.slow
def test_pages_of_one_gib_come_and_go_with_the_reboot(roomy: Lab) -> None:
    lab = roomy
    lab.ssh("node1", FILL)
    first = boot_id(lab)

    # No reboot is allowed: the node is built, the run reports it, and the pages are missing.
    done = lab.site(*asked())
    assert done.code == 0, done.text
    assert "reboot required: huge pages: 1 of 1 GiB on NUMA node 1 are asked for" in done.stdout
    assert lab.ssh("node1", f"cat {PAGES}") == "0"
    assert all(line.rstrip().endswith(WORDS) for line in lab.ssh("node1", LINUX).splitlines())
    assert (boot_id(lab), reboot_required(lab)) == (first, True)
    done = lab.verify("--level", "config")
    assert done.code == 1, done.text
    failed = {check["id"]: check for check in lab.record()["checks"] if check["status"] == "fail"}
    assert set(failed) == {"node.reboot", "memory.hugepages"}
    assert "host_memory_reboot_ok" in failed["node.reboot"]["remedy"]

    # A reboot is allowed, but somebody uses the volume.
    lab.ssh("node1", f"cd {POINT}; nohup sleep 3600 > /dev/null 2>&1 & cd /; sleep 1")
    done = lab.site(*asked(host_memory_reboot_ok=True))
    assert done.code != 0
    assert "busy: a reboot would end somebody's work" in done.text
    assert "`sleep` (working directory)" in done.text
    assert boot_id(lab) == first
    lab.ssh("node1", "pkill -x sleep")

    done = lab.site(*asked(host_memory_reboot_ok=True))
    assert done.code == 0, done.text
    assert lab.ssh("node1", f"cat {PAGES}") == "1"
    assert WORDS in lab.ssh("node1", "cat /proc/cmdline")
    second = boot_id(lab)
    assert second != first
    assert not reboot_required(lab)
    assert "reboot required" not in done.stdout
    assert "huge pages take 1 GiB of" in done.stdout

    done = lab.site(*asked(host_memory_reboot_ok=True))
    assert (done.code, changed_tasks(done.stdout)) == (0, [])
    done = lab.verify("--level", "config")
    assert done.code == 0, done.text

    # Given back at once: no reboot is needed for that.
    done = lab.site(*asked(host_memory_hugepages=[], host_memory_reboot_ok=True))
    assert done.code == 0, done.text
    assert lab.ssh("node1", f"cat {PAGES}") == "0"
    assert "hugepages" not in lab.ssh("node1", LINUX)
    assert boot_id(lab) == second
