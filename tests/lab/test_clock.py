"""A node whose clock is behind what its files say: the initramfs is judged by what is in it."""

from __future__ import annotations

import pytest
from conftest import POINT, Lab, changed_tasks

pytestmark = [pytest.mark.usefixtures("marker"), pytest.mark.slow]

LINE = "unmkinitramfs $(readlink -f /initrd.img) /run/image && grep -rhs ^ARRAY /run/image --include=mdadm.conf; rm -rf /run/image"


def test_a_clock_behind_the_image_still_gets_the_array_into_it(blank: Lab) -> None:
    lab = blank
    # The drives are blank, and the image is from before: it knows no array.
    assert lab.ssh("node1", f"{LINE}; true") == ""
    lab.ssh("node1", "date -s 2001-02-03")
    done = lab.site()
    assert done.code == 0, done.text
    assert lab.ssh("node1", "date +%Y") == "2001"
    wanted = lab.ssh("node1", "grep ^ARRAY /etc/mdadm/mdadm.conf")
    assert wanted.startswith("ARRAY /dev/md/nvme_raid0 ")
    assert lab.ssh("node1", LINE) == wanted

    done = lab.site()
    assert (done.code, changed_tasks(done.stdout)) == (0, []), done.text

    lab.reboot("node1")
    lab.ssh("node1", f"n=0; until mountpoint -q {POINT}; do n=$((n+1)); [ $n -lt 300 ] || exit 1; sleep 0.2; done")
    assert lab.ssh("node1", "readlink -f /dev/md/nvme_raid0").startswith("/dev/md")
    done = lab.verify("--level", "config")
    assert done.code == 0, done.text
