"""A node with an array for each NUMA node: built, shuffled, cut off, a drive lost and replaced, and given back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import POINT, Lab, build, changed_tasks, groups_of, play, row, started

SWAP = ("-e", "replace_drive_old_serial=LAB1NV2", "-e", "replace_drive_new_serial=LAB1NV2R")
FILL = f"for d in {POINT}/numa*; do head -c 9M /dev/urandom > $d/data; done; sync; "
SUMS = f"cd {POINT}; sha256sum numa*/data 2>/dev/null; true"
NODES = (
    "for d in $(lsblk -dno NAME | grep nvme); do "
    "echo $(lsblk -dno SERIAL /dev/$d) $(cat /sys/block/$d/device/device/numa_node); done"
)
CUT_OFF = (
    f"umount {POINT}/numa1; mdadm --stop /dev/md/nvme_raid0_numa1; "
    "for d in $(lsblk -dno NAME,SERIAL | grep LAB1NV | cut -d' ' -f1); do "
    "ls /sys/block/$d/holders | grep -q md || { wipefs -aq /dev/$d; blkdiscard -f /dev/$d; }; done; "
    "sed -i /numa1/d /etc/fstab; rm /etc/tunetool/node.json; udevadm settle"
)
"""What a run leaves that had made the first volume, and ended before it made the second array."""


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    system = os.environ.get("TUNETOOL_LAB_OS", "debian12")
    with started(tmp_path_factory, "--nodes", "1", "--numa", "--os", system) as lab:
        yield lab


@pytest.fixture
def empty(two_nodes: Lab) -> Lab:
    two_nodes.reset("node1")
    return two_nodes


def nodes_of(lab: Lab) -> dict[str, str]:
    """The NUMA node of each data drive by its serial number, as the kernel says now."""
    lines = [line.split() for line in lab.ssh("node1", NODES).splitlines()]
    return {line[0]: line[1] for line in lines if line[0].startswith("LAB1NV")}


def members(lab: Lab) -> dict[str, list[str]]:
    """Serial numbers of the drives under what is mounted for each volume."""
    lines = lab.ssh(
        "node1",
        f"findmnt -rno TARGET,SOURCE | grep {POINT}/ | while read t s; do echo ${{t##*/}} "
        "$(for d in /sys/block/${s##*/}/slaves/*; do lsblk -dno SERIAL /dev/${d##*/}; done); done",
    )
    return {line.split()[0]: sorted(line.split()[1:]) for line in lines.splitlines()}


def four(second: str) -> tuple[str, str]:
    serials = ["LAB1NV1", second, "LAB1NV3", "LAB1NV4"]
    return "-e", json.dumps({"nvme_drives_count": 4, "nvme_drives_serials": serials})


@pytest.mark.slow
def test_each_numa_node_keeps_its_array_in_other_slots(empty: Lab) -> None:
    nodes = nodes_of(empty)
    wanted = {f"numa{node}": sorted(serial for serial in nodes if nodes[serial] == node) for node in ("0", "1")}
    assert [len(each) for each in wanted.values()] == [4, 4]
    build(empty, "numa")
    assert members(empty) == wanted
    assert empty.ssh("node1", "ls /dev/md").split() == ["nvme_raid0_numa0", "nvme_raid0_numa1"]
    sums = empty.ssh("node1", FILL + SUMS)
    assert len(sums.splitlines()) == 2
    assert changed_tasks(build(empty, "numa")) == []
    other = empty.site()
    assert other.code != 0
    assert "`array.groups`: expected all, found numa" in " ".join(other.text.split())
    # Every drive goes to the next slot, which is of the other NUMA node.
    empty.reboot("node1", "--shuffle")
    now = nodes_of(empty)
    assert all(now[serial] != nodes[serial] for serial in nodes)
    assert members(empty) == wanted
    assert "drift: array.numa[numa0]" in build(empty, "numa")
    assert members(empty) == wanted
    assert empty.ssh("node1", SUMS) == sums


@pytest.mark.slow
def test_a_run_cut_between_two_arrays_goes_on(empty: Lab) -> None:
    build(empty, "numa", *four("LAB1NV2"))
    wanted = members(empty)
    sums = empty.ssh("node1", FILL + SUMS).splitlines()
    empty.ssh("node1", CUT_OFF)
    build(empty, "numa", *four("LAB1NV2"))
    assert members(empty) == wanted
    assert empty.ssh("node1", SUMS).splitlines() == sums[:1]


@pytest.mark.slow
def test_a_lost_drive_costs_the_volume_of_its_numa_node(empty: Lab, tmp_path: Path) -> None:
    build(empty, "numa", *four("LAB1NV2"))
    wanted = members(empty)
    volume, other = (("numa1", "numa0"), ("numa0", "numa1"))["LAB1NV2" in wanted["numa0"]]
    sums = empty.ssh("node1", FILL + SUMS).splitlines()
    kept = [line for line in sums if f"{other}/" in line]
    empty.lab("fault", "node1", "swap-drive", "--drive", "LAB1NV2")
    plan = tmp_path / "replace.json"
    swap = (*four("LAB1NV2R"), *SWAP)
    planned = play(empty, "numa", "replace_drive", *swap, "--tags", "plan", "-e", f"plan_file={plan}")
    assert f"would be lost: volume `{volume}`" in planned
    assert f"keeps volume `{other}`" in row(planned, wanted[other][0])
    play(empty, "numa", "replace_drive", *swap, "-e", f"apply_plan={plan}")
    assert members(empty) == {**wanted, volume: sorted({*wanted[volume], "LAB1NV2R"} - {"LAB1NV2"})}
    assert empty.ssh("node1", SUMS).splitlines() == kept
    plan = tmp_path / "teardown.json"
    planned = play(empty, "numa", "teardown", "--tags", "plan", "-e", f"plan_file={plan}")
    assert "would be lost: volume `numa0`" in planned
    assert "would be lost: volume `numa1`" in planned
    play(empty, "numa", "teardown", "-e", f"apply_plan={plan}")
    left = (
        "for d in $(lsblk -dno NAME,SERIAL | grep LAB1NV | cut -d' ' -f1); do wipefs -n /dev/$d; done; "
        f"grep {POINT} /etc/fstab /proc/self/mountinfo; grep numa /etc/mdadm/mdadm.conf; "
        "find /etc/systemd/system -name '*tunetool*'; ls /dev/md 2>/dev/null; "
        f"ls -d {POINT} /etc/tunetool/node.json /etc/tunetool/drives.json /etc/tunetool/array* 2>/dev/null; true"
    )
    assert empty.ssh("node1", left) == ""


@pytest.mark.slow
def test_an_array_whose_drives_are_all_pulled_is_let_go(empty: Lab, tmp_path: Path) -> None:
    build(empty, "numa", *four("LAB1NV2"))
    volume, serials = next((name, each) for name, each in members(empty).items() if "LAB1NV2" in each)
    # Of a volume that nobody uses systemd unmounts what is left, and md ends the array by itself.
    # A unit of systemd's own would be stopped with the mount.
    empty.ssh("node1", f"cd {POINT}/{volume}; setsid -f sleep 3600 < /dev/null > /dev/null 2>&1")
    for serial in serials:
        empty.lab("fault", "node1", "remove-drive", "--drive", serial)
    empty.ssh("node1", "pkill -x sleep; sleep 1")
    refused = empty.site(*groups_of("numa"), *four("LAB1NV2"))
    assert refused.code != 0
    assert f"`array.state[{volume}]`: expected active, found without any of its drives" in " ".join(
        refused.text.split()
    )
    plan = tmp_path / "teardown.json"
    planned = play(empty, "numa", "teardown", "--tags", "plan", "-e", f"plan_file={plan}")
    assert f"volume `{volume}`: nothing is left on its drives, or they are gone" in planned
    play(empty, "numa", "teardown", "-e", f"apply_plan={plan}")
    assert empty.ssh("node1", "cat /sys/block/md*/md/array_state 2>/dev/null; true") == ""
    assert empty.ssh("node1", f"ls /dev/md 2>/dev/null; grep {POINT} /etc/fstab /proc/self/mountinfo; true") == ""


@pytest.mark.slow
def test_two_arrays_that_lost_a_drive_are_made_again_in_turn(empty: Lab, tmp_path: Path) -> None:
    build(empty, "numa", *four("LAB1NV2"))
    wanted = members(empty)
    first = next(name for name, each in wanted.items() if "LAB1NV2" in each)
    second = "numa1" if first == "numa0" else "numa0"
    lost = ("LAB1NV2", wanted[second][0])
    for serial in lost:
        empty.lab("fault", "node1", "swap-drive", "--drive", serial)
    serials = [serial + "R" if serial in lost else serial for each in wanted.values() for serial in each]
    stays = "-e", json.dumps({"nvme_drives_count": 4, "nvme_drives_serials": serials})
    for volume, serial in zip((first, second), lost, strict=True):
        swap = (*stays, "-e", f"replace_drive_old_serial={serial}", "-e", f"replace_drive_new_serial={serial}R")
        plan = tmp_path / f"{volume}.json"
        play(empty, "numa", "replace_drive", *swap, "--tags", "plan", "-e", f"plan_file={plan}")
        done = play(empty, "numa", "replace_drive", *swap, "-e", f"apply_plan={plan}")
        said = f"volume `{second}` is broken without `{lost[1]}`, and was left alone" in " ".join(done.split())
        assert said == (volume == first)
        assert members(empty)[volume] == sorted({*wanted[volume], serial + "R"} - {serial})
        if volume == first:
            empty.ssh("node1", f"head -c 9M /dev/urandom > {POINT}/{first}/data; sync")
            sums = empty.ssh("node1", SUMS)
    assert empty.ssh("node1", SUMS) == sums
    manifest = json.loads(empty.ssh("node1", "cat /etc/tunetool/node.json"))
    assert [each["name"] for each in manifest["volumes"]] == ["numa0", "numa1"]
