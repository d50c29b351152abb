"""A RAID10 and a RAID1 lose a drive while they are written, and get another one: every byte stays, and no plan is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import POINT, Lab, changed_tasks
from test_replacement import DEV, give_up, one_line, play

pytestmark = [pytest.mark.usefixtures("marker"), pytest.mark.slow]

SUMS = "/root/sums"
FILES = f"""cd {POINT}; for n in 1 2 3 4; do head -c 30M /dev/urandom > file$n; done; sync; sha256sum file? > {SUMS}"""
# It ends itself: a test that fails leaves no writer.
LOAD = f"""cat > /root/load << 'END'
end=$((SECONDS + 3000)); n=0
while [ -e {POINT}/go ] && [ $SECONDS -lt $end ]; do
  n=$(((n + 1) % 4))
  head -c 8M /dev/urandom > /dev/shm/sent && cp /dev/shm/sent {POINT}/load$n && sync {POINT}/load$n &&
    cmp /dev/shm/sent {POINT}/load$n && echo ok || echo BROKEN
done
END
touch {POINT}/go; nohup bash /root/load > /root/load.log 2>&1 < /dev/null & echo"""
WRITTEN = "sleep 5; grep -c ok /root/load.log; grep -vc ok /root/load.log; true"
EQUAL = f"echo 3 > /proc/sys/vm/drop_caches; cd {POINT}; sha256sum --quiet -c {SUMS} && echo equal"
STOP = f"rm {POINT}/go; sleep 10; pgrep -f /root/load"
FILLED = f"""for n in $(seq 300); do [ "$(cat /sys/block/md127/md/degraded)" = 0 ] && break; sleep 1; done
cat /sys/block/md127/md/degraded /sys/block/md127/md/level; findmnt -no UUID {POINT}"""
LEFT = DEV + "for n in 1 4; do wipefs -n $(dev LAB1NV$n); done; grep -c md127 /proc/mdstat; true"
CHECKED = "/opt/tunetool/bin/tunetool verify --level config --runs-dir /tmp/runs 2>&1; echo"


def asked(**variables: object) -> tuple[str, str]:
    return ("-e", json.dumps(variables))


def breaks(lab: Lab, old: str, members: int) -> tuple[str, int]:
    """Pull a drive under load. Returns the volume's UUID, and how many files were written and read back."""
    volume = lab.ssh("node1", f"{FILES}; findmnt -no UUID {POINT}; {LOAD}").split()[0]
    lab.lab("fault", "node1", "remove-drive", "--drive", old)
    ok, broken = lab.ssh("node1", WRITTEN).split()
    assert (int(ok) > 0, broken) == (True, "0")
    said = lab.ssh("node1", f"{EQUAL}; {CHECKED}")
    assert "equal" in said
    assert f"array.members: degraded, still serves: {members - 1} of {members} members; missing `{old}`" in said, said
    assert "replace_drive" in said
    return volume, int(ok)


def is_repaired(lab: Lab, old: str, new: str, variables: tuple[str, str], before: tuple[str, int]) -> None:
    """``new`` comes for ``old`` while the load goes on."""
    swap = ("-e", json.dumps({"replace_drive_old_serial": old, "replace_drive_new_serial": new}))
    done = play(lab, "replace_drive", *swap, *variables)
    assert done.code == 0, done.text
    assert "every member has all of its data" in done.stdout
    degraded, _level, uuid = lab.ssh("node1", FILLED).split()
    assert (degraded, uuid) == ("0", before[0])
    ok, broken = lab.ssh("node1", f"{WRITTEN}; {STOP}; true").split()[:2]
    assert (int(ok) > before[1], broken) == (True, "0")
    said = lab.ssh("node1", f"{EQUAL}; {CHECKED}; grep serial /etc/tunetool/node.json")
    assert "equal" in said
    assert "PASS" in said, said
    assert (f'"{new}"' in said, f'"{old}"' in said) == (True, False)


def test_a_raid10_loses_a_drive_and_no_byte(blank: Lab, tmp_path: Path) -> None:
    ten = asked(raid_array_level=10)
    done = blank.site(*ten)
    assert done.code == 0, done.text
    blank.lab("fault", "node1", "extra-drive")
    before = breaks(blank, "LAB1NV3", 8)
    refused = blank.site(*ten)
    assert refused.code != 0
    assert "put the drive back, or replace it without loss" in one_line(refused)
    is_repaired(blank, "LAB1NV3", "LAB1NV9", ten, before)
    again = blank.site(*ten)
    assert (again.code, changed_tasks(again.stdout)) == (0, []), again.text
    done = give_up(blank, tmp_path / "plan.json")
    assert done.code == 0, done.text
    assert blank.ssh("node1", LEFT) == "0"


def test_a_raid1_loses_a_drive_and_no_byte(lab: Lab, tmp_path: Path) -> None:
    """On a node that has had its volume taken down, or never had one."""
    done = lab.site(*asked(raid_array_level="raid1", nvme_drives_count=2, nvme_drives_serials=["LAB1NV1", "LAB1NV2"]))
    assert done.code == 0, done.text
    before = breaks(lab, "LAB1NV2", 2)
    after = asked(raid_array_level=1, nvme_drives_count=2, nvme_drives_serials=["LAB1NV1", "LAB1NV4"])
    is_repaired(lab, "LAB1NV2", "LAB1NV4", after, before)
    done = give_up(lab, tmp_path / "plan.json")
    assert done.code == 0, done.text
    assert lab.ssh("node1", LEFT) == "0"
