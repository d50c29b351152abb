"""I/O settings on a built node: a drive that is plugged in again, somebody else's changes, refusals, and giving back."""

from __future__ import annotations

import json

import pytest
from conftest import POINT, Lab

pytestmark = [pytest.mark.usefixtures("marker"), pytest.mark.slow]

# Other tests show the installation of the program; here it would only take time.
QUICK = {"tunetool_install": False}
LOOK = """cd /sys/block
for drive in nvme?n1; do printf '%s %s %s\\n' $(cat $drive/device/serial) $(cat $drive/queue/nr_requests) \
  $(sed 's/.*\\[\\(.*\\)\\].*/\\1/' $drive/queue/scheduler); done
echo read-ahead $(cat $(basename $(readlink /dev/md/nvme_raid0))/queue/read_ahead_kb)
echo dirty $(sysctl -n vm.dirty_background_bytes vm.dirty_background_ratio vm.dirty_bytes vm.dirty_ratio)
echo thp $(sed 's/.*\\[\\(.*\\)\\].*/\\1/' /sys/kernel/mm/transparent_hugepage/enabled)"""
NOTHING = {
    f"io_tuning_{name}": ""
    for name in (
        *("scheduler", "nr_requests", "read_ahead", "transparent_hugepages", "dirty_background", "dirty"),
        *("cpu_governor", "fstrim_timer"),
    )
}
HOT_PLUG = f"""set -e
umount {POINT}
mdadm --stop /dev/md/nvme_raid0
drive=$(grep -l LAB1NV3 /sys/block/nvme?n1/device/serial | cut -d/ -f4)
echo 1 > /sys/block/$drive/device/device/remove
sleep 1
! grep -q LAB1NV3 /sys/block/nvme?n1/device/serial
echo 1 > /sys/bus/pci/rescan
udevadm settle
mdadm --assemble --scan
udevadm settle
mount {POINT}"""


def look(lab: Lab) -> dict[str, list[str]]:
    return {words[0]: words[1:] for words in map(str.split, lab.ssh("node1", LOOK).splitlines())}


def test_settings_hold_are_watched_and_are_given_back(built: Lab) -> None:
    members = [f"LAB1NV{number}" for number in range(1, 9)]
    as_asked = {"read-ahead": ["4096"], "dirty": [str(64 * 2**20), "0", "0", "25"], "thp": ["madvise"]}
    as_asked.update({serial: ["128", "mq-deadline"] for serial in members})
    settings = look(built)
    stranger = settings.pop("LAB1SYS")
    assert settings == as_asked

    built.ssh("node1", HOT_PLUG)
    settings = look(built)
    settings.pop("LAB1SYS")
    assert settings == as_asked

    built.ssh(
        "node1",
        "echo none > /sys/block/$(basename $(readlink /dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_LAB1NV5))/queue/scheduler; "
        "echo vm.dirty_ratio = 40 > /etc/sysctl.d/99-site.conf; sysctl -q -p /etc/sysctl.d/99-site.conf",
    )
    done = built.verify("--level", "config")
    assert done.code == 1, done.text
    failed = {check["id"]: check for check in built.record()["checks"] if check["status"] == "fail"}
    # Another scheduler has its own number of requests.
    assert set(failed) == {"io_tuning.scheduler", "io_tuning.nr_requests", "io_tuning.dirty"}
    assert failed["io_tuning.scheduler"]["found"] == "`none` on `LAB1NV5`"
    assert "`/etc/sysctl.d/99-site.conf` line 1 has `vm.dirty_ratio = 40`" in failed["io_tuning.dirty"]["remedy"]

    refused = built.site("-e", json.dumps({**QUICK, "io_tuning_scheduler": "cfq"}))
    assert refused.code == 2
    assert "scheduler `cfq` is not offered for drive `LAB1NV1`" in " ".join(refused.stdout.split())

    back = built.site("-e", json.dumps({**QUICK, **NOTHING}))
    assert back.code == 0, back.text
    settings = look(built)
    assert {tuple(settings[serial]) for serial in (*members, "LAB1SYS")} == {tuple(stranger)}
    # The kernel's own read-ahead for such an array is two stripes; a value that somebody else set later stays.
    assert (settings["read-ahead"], settings["thp"]) == (["16384"], ["always"])
    assert settings["dirty"] == ["0", "10", "0", "40"]
    left = built.ssh("node1", "find /etc -name '*tunetool-io*' -o -name 'io-tuning.json'")
    assert left.strip() == ""
