"""A RAID10 and a RAID1 lose a drive while they are written, and get another one: every byte stays, and no plan is asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import POINT, Lab, changed_tasks, started
from test_replacement import DEV, give_up, one_line, play

pytestmark = [pytest.mark.usefixtures("marker"), pytest.mark.slow]

SUMS = "/root/sums"
FILES = f"""cd {POINT}; for n in 1 2 3 4; do head -c 30M /dev/urandom > file$n; done; sync; sha256sum file? > {SUMS}"""
# It ends itself: a test that fails leaves no writer.
LOAD = f"""cat > /root/writer << 'END'
end=$((SECONDS + 3000)); n=0
while [ -e {POINT}/go ] && [ $SECONDS -lt $end ]; do
  n=$(((n + 1) % 4))
  head -c 8M /dev/urandom > /dev/shm/sent && cp /dev/shm/sent {POINT}/load$n && sync {POINT}/load$n &&
    cmp /dev/shm/sent {POINT}/load$n && echo ok || echo BROKEN
done
END
cd /; touch {POINT}/go; nohup bash /root/writer > /root/load.log 2>&1 < /dev/null & echo"""
# One more file was begun and ended meanwhile.
WRITTEN = """n=$(grep -c ok /root/load.log)
for second in $(seq 100); do [ $(grep -c ok /root/load.log) -gt $((n + 1)) ] && break; sleep 1; done
grep -c ok /root/load.log; grep -vc ok /root/load.log"""
EQUAL = f"echo 3 > /proc/sys/vm/drop_caches; cd {POINT}; sha256sum --quiet -c {SUMS} && echo equal"
# The sums of what was written to a degraded array are those of the page cache.
STOP = f"""rm {POINT}/go; while pgrep -f 'bash /root/[w]riter' > /dev/null; do sleep 1; done
cd {POINT}; sha256sum load? >> {SUMS}"""
FILLED = f"""for n in $(seq 300); do [ "$(cat /sys/block/md127/md/degraded)" = 0 ] && break; sleep 1; done
cat /sys/block/md127/md/degraded /sys/block/md127/md/level; findmnt -no UUID {POINT}"""
LEFT = DEV + "for n in 1 2 4 5; do wipefs -n $(dev LAB1NV$n); done; grep -c md127 /proc/mdstat; true"
CHECKED = "/opt/tunetool/bin/tunetool verify --level config --runs-dir /tmp/runs 2>&1; echo"
HEALTH = "systemctl start tunetool-health.service; cat /run/tunetool/health.json"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One node for both arrays, with drives that are filled in seconds."""
    system = os.environ.get("TUNETOOL_LAB_OS", "debian12")
    with started(tmp_path_factory, "--nodes", "1", "--os", system, "--drive-size", "1GiB") as lab:
        yield lab


def asked(*members: int, **variables: object) -> tuple[str, str]:
    serials = [f"LAB1NV{number}" for number in members]
    sized = {"nvme_drives_size": "1GiB", "nvme_drives_count": len(serials), "nvme_drives_serials": serials}
    return ("-e", json.dumps({**sized, **variables}))


def filled(lab: Lab) -> str:
    """Files with their sums, and a writer that goes on. Returns the volume's UUID."""
    return lab.ssh("node1", f"{FILES}; findmnt -no UUID {POINT}; {LOAD}").split()[0]


def serves_without(lab: Lab, old: str, members: int) -> int:
    """The volume, under load. Returns how many files were written and read back."""
    ok, broken = lab.ssh("node1", f"{WRITTEN}; true").split()
    assert (int(ok) > 0, broken) == (True, "0")
    said = lab.ssh("node1", f"{EQUAL}; {CHECKED}")
    assert "equal" in said
    assert f"array.members: degraded, still serves: {members - 1} of {members} members; missing `{old}`" in said, said
    assert "replace_drive" in said
    return int(ok)


def exchanged(lab: Lab, old: str, new: str, *arguments: str) -> str:
    """``new`` comes for ``old`` while the load goes on. Returns what was said of the rebuild."""
    swap = ("-e", json.dumps({"replace_drive_old_serial": old, "replace_drive_new_serial": new}))
    done = play(lab, "replace_drive", *swap, *arguments)
    assert done.code == 0, done.text
    return done.stdout


def is_whole(lab: Lab, old: str, new: str, volume: str, ok_before: int) -> None:
    """With every byte that was written before and since."""
    degraded, _level, uuid = lab.ssh("node1", FILLED).split()
    assert (degraded, uuid) == ("0", volume)
    ok, broken = lab.ssh("node1", f"{WRITTEN}; {STOP}; true").split()[:2]
    assert (int(ok) > ok_before, broken) == (True, "0")
    said = lab.ssh("node1", f"{EQUAL}; {CHECKED}; grep serial /etc/tunetool/node.json")
    assert "equal" in said
    assert "PASS" in said, said
    assert (f'"{new}"' in said, f'"{old}"' in said) == (True, False)


def test_a_raid10_loses_a_drive_and_no_byte(lab: Lab, tmp_path: Path) -> None:
    """One that is pulled, under load."""
    level: dict[str, object] = {"raid_array_level": 10, "node_health_enabled": True}
    ten = asked(1, 2, 3, 4, **level)
    done = lab.site(*ten)
    assert done.code == 0, done.text
    volume = filled(lab)
    lab.lab("fault", "node1", "remove-drive", "--drive", "LAB1NV3")
    ok = serves_without(lab, "LAB1NV3", 4)
    said = lab.ssh("node1", HEALTH)
    assert "degraded, still serves: 3 of 4 members; missing `LAB1NV3`" in said, said
    refused = lab.site(*ten)
    assert refused.code != 0
    assert "put the drive back, or replace it without loss" in one_line(refused)
    after = asked(1, 2, 5, 4, **level)
    assert "every member has all of its data" in exchanged(lab, "LAB1NV3", "LAB1NV5", *after)
    is_whole(lab, "LAB1NV3", "LAB1NV5", volume, ok)
    again = lab.site(*after)
    assert (again.code, changed_tasks(again.stdout)) == (0, []), again.text
    done = give_up(lab, tmp_path / "plan.json")
    assert done.code == 0, done.text
    assert lab.ssh("node1", LEFT) == "0"


def test_a_raid1_loses_a_drive_and_no_byte(lab: Lab, tmp_path: Path) -> None:
    """One that md gives up, and that stays in its slot; on a node that had its volume taken down, or never had one."""
    done = lab.site(*asked(1, 2, raid_array_level="raid1"))
    assert done.code == 0, done.text
    volume = filled(lab)
    lab.ssh("node1", DEV + "mdadm --manage /dev/md127 --fail $(dev LAB1NV2)")
    ok = serves_without(lab, "LAB1NV2", 2)
    # The rebuild is seen on its way, also where the machine is busy.
    lab.ssh("node1", "echo 1000 > /sys/block/md127/md/sync_speed_max")
    after = asked(1, 4, raid_array_level=1)
    watched = ("-e", "replace_drive_watch_seconds=10", "--tags", "replace")
    assert "array `md127`: the rebuild is at" in exchanged(lab, "LAB1NV2", "LAB1NV4", *after, *watched)
    said = lab.ssh("node1", f"{CHECKED}; echo system > /sys/block/md127/md/sync_speed_max")
    assert "array.redundancy: degraded, still serves: the rebuild onto `LAB1NV4`" in said, said
    done = lab.site(*after)
    assert done.code == 0, done.text
    is_whole(lab, "LAB1NV2", "LAB1NV4", volume, ok)
    assert lab.ssh("node1", DEV + "wipefs -n $(dev LAB1NV2)") == ""
    done = give_up(lab, tmp_path / "plan.json")
    assert done.code == 0, done.text
    assert lab.ssh("node1", LEFT) == "0"
