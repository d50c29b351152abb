"""Saved states, and drives that change while a node is off: reading, refusing, listing and renaming."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.lab import faults, fleet, node, quiesce, renewal, saved
from tunetool.lab.machine import Drive
from tunetool.lab.quiesce import DriveUse, Mount
from tunetool.lab.renewal import Change
from tunetool.lab.state import Fault, Lab, NodeState

# Printed by `quiesce.LOOK` on a built node (the mounts of the kernel left out), a swap and a place with a space added.
PRINTED = """\
holder md127
holder md127
array md127 clean 0 nvme_raid0
array md126 inactive 8
swap /dev/nvme3n1 6d0c
SOURCE="/dev/vda" UUID="62f4c1c6" FSTYPE="ext4" FSROOT="/" OPTIONS="rw,relatime" TARGET="/"
SOURCE="tmpfs" UUID="" FSTYPE="tmpfs" FSROOT="/" OPTIONS="rw,nosuid,nodev,size=524288k,inode64" TARGET="/dev/shm"
SOURCE="/dev/nvme0n1" UUID="c1f3" FSTYPE="ext4" FSROOT="/" OPTIONS="rw,relatime" TARGET="/srv/system"
SOURCE="/dev/md127" UUID="7e6b" FSTYPE="xfs" FSROOT="/" OPTIONS="rw,noatime,swidth=16384" TARGET="/mnt/nvme\\x20raid0"
"""
LOOK = DriveUse(
    ("md127", "md126"),
    ("nvme_raid0",),
    (
        Mount("c1f3", "ext4", "rw,relatime", "/srv/system"),
        Mount("7e6b", "xfs", "rw,noatime,swidth=16384", "/mnt/nvme raid0"),
    ),
    (("/dev/nvme3n1", "6d0c"),),
)
NODE = NodeState("node1", 1, "debian12", Path("/cache/image"), 2**31, "tcg", 11, 8, 2**20, 2222)


def off(lab: Lab, drives: int = 8) -> NodeState:
    """A node that is off, its drives full of something."""
    directory = lab.node_dir("node1") / "drives"
    directory.mkdir(parents=True)
    serials = ["LAB1SYS", *(f"LAB1NV{number + 1}" for number in range(drives))]
    node = replace(NODE, drive_count=drives, faults=[], drives=[])
    for port, serial in enumerate(serials):
        node.drives.append(Drive(serial, directory / f"{serial}.img", 2**20, port))
        node.drives[-1].path.write_bytes(serial.encode() * 100)
    lab.write(node)
    return node


def keep(lab: Lab, name: str, node: NodeState) -> None:
    folder = lab.saved_dir("node1") / name
    (folder / "drives").mkdir(parents=True)
    for drive in node.drives:
        (folder / "drives" / drive.path.name).write_bytes(drive.path.read_bytes())
    kept = {"node": asdict(node), "standing": asdict(LOOK)}
    (folder / "saved.json").write_text(json.dumps(kept, default=str))


def test_what_stands_on_the_drives_is_read_and_nothing_else():
    assert quiesce.parse(PRINTED, "node1") == LOOK


def test_it_is_taken_down_in_the_opposite_order_and_brought_back():
    down, up = quiesce.take_down(LOOK).splitlines(), quiesce.bring_back(LOOK)
    assert [line.split()[0] for line in down] == [
        "sync",
        "swapoff",
        "umount",
        "umount",
        "mdadm",
        "mdadm",
        "udevadm",
        "sync",
    ]
    assert down[2:4] == ["umount '/mnt/nvme raid0'", "umount /srv/system"]
    assert up.index("/dev/md/nvme_raid0") < up.index("UUID=c1f3") < up.index("UUID=7e6b '/mnt/nvme raid0'")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("holder dm-0", "`dm-0` uses its drives"),
        ("array md127 broken 0 nvme_raid0", "`md127` is broken"),
        ("array md127 clean 1 nvme_raid0", "`md127` is broken"),
        ('SOURCE="/dev/md127[/a]" UUID="7" FSTYPE="xfs" FSROOT="/a" OPTIONS="rw" TARGET="/b"', "`/b` is a bind mount"),
    ],
)
def test_what_could_not_be_brought_back_is_refused(line: str, said: str):
    with pytest.raises(CannotJudge, match=said):
        quiesce.parse(PRINTED + line + "\n", "node1")


def test_a_state_that_is_not_there_names_those_that_are(lab: Lab):
    node = off(lab)
    with pytest.raises(UsageProblem, match="`x` is not a saved state") as caught:
        saved.find(lab, "node1", "x")
    assert caught.value.hint == "save one: tunetool lab save node1 x"
    keep(lab, "built", node)
    (lab.saved_dir("node1") / ".x").mkdir()
    with pytest.raises(UsageProblem) as caught:
        saved.find(lab, "node1", "x")
    assert caught.value.hint == "there is `built`"
    with pytest.raises(UsageProblem, match="`node2` is not a node"):
        saved.find(lab, "node2", "built")


@pytest.mark.parametrize("name", ["", ".x", "../x", "a/b", "a b", "-x", "built"])
def test_a_name_that_is_none_or_is_taken_is_refused(lab: Lab, name: str):
    keep(lab, "built", off(lab))
    with pytest.raises(UsageProblem):
        saved.check_name(lab, "node1", name)


def test_a_state_comes_back_in_the_nodes_own_files(lab: Lab):
    node = off(lab)
    keep(lab, "built", node)
    kept = saved.find(lab, "node1", "built")
    assert kept.node == node
    assert kept.drive_use == LOOK
    again = saved.start(lab, kept, 2300)
    assert again == replace(node, ssh_port=2300)
    assert all(drive.path.parent == lab.node_dir("node1") / "drives" for drive in again.drives)


def test_saved_states_outlive_a_failed_node_and_end_with_the_lab(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    keep(lab, "built", off(lab))

    def fails(*_: object) -> None:
        raise CannotJudge("QEMU did not start")

    monkeypatch.setattr(node, "start_restored", fails)
    monkeypatch.setattr("tunetool.lab.fleet.programs.require", lambda *_: None)
    with pytest.raises(CannotJudge, match="QEMU did not start"):
        fleet.reset(lab, "node1", lambda text: None, to="built")
    assert lab.names() == []
    assert saved.names(lab, "node1") == ["built"]
    fleet.down(lab)
    assert not lab.directory.exists()


def test_a_node_that_is_ended_takes_its_saved_states_along(lab: Lab):
    keep(lab, "built", off(lab))
    fleet.down(lab, "node1")
    assert saved.every(lab) == []


@pytest.mark.parametrize("drives", [2, 7, 8])
def test_shuffled_drives_keep_their_serials_and_bytes(lab: Lab, drives: int):
    node = off(lab, drives)
    before = {drive.serial: drive for drive in node.drives}
    renewal.apply(lab, node, Change(shuffle=True), lambda text: None)
    assert node == lab.read("node1")
    assert node.drives[0] == before["LAB1SYS"]
    assert sorted(drive.port for drive in node.drives) == list(range(drives + 1))
    assert [drive.port for drive in node.drives] == list(range(drives + 1))
    for drive in node.drives[1:]:
        assert drive == replace(before[drive.serial], port=drive.port)
        assert drive.port != before[drive.serial].port
        assert drive.path.read_bytes().startswith(drive.serial.encode())


def test_one_drive_cannot_be_shuffled(lab: Lab):
    with pytest.raises(UsageProblem, match="no two data drives"):
        renewal.check(off(lab, 1), Change(shuffle=True))


def test_blank_drives_forget_their_data_and_keep_their_place(lab: Lab):
    node = off(lab)
    node.faults = [
        Fault("has-filesystem", "LAB1NV2"),
        Fault("mixed-size", "LAB1NV4"),
        Fault("remove-drive", "LAB1NV9"),
        Fault("io-errors", "LAB1NV3"),
    ]
    before = list(node.drives)
    node.drives[3] = replace(before[3], bad_sectors=True)
    renewal.apply(lab, node, Change(blank=True), lambda text: None)
    assert node.drives == before
    assert node.drives[0].path.read_bytes().startswith(b"LAB1SYS")
    for drive in node.drives[1:]:
        assert drive.path.read_bytes() == bytes(2**20)
    assert node.faults == [Fault("mixed-size", "LAB1NV4"), Fault("remove-drive", "LAB1NV9")]


def test_new_serials_are_told_and_understood(lab: Lab):
    node = off(lab)
    node.faults = [Fault("mixed-size", "LAB1NV4")]
    for letter in "WXYZV":
        renewal.apply(lab, node, Change(blank=True, new_serials=True), lambda text: None)
        assert [drive.serial for drive in node.drives[1:]] == [f"LAB1N{letter}{number}" for number in range(1, 9)]
        assert node.faults == [Fault("mixed-size", f"LAB1N{letter}4")]
        assert faults.default_serial(node) == f"LAB1N{letter}3"
        files = sorted(path.name for path in (lab.node_dir("node1") / "drives").iterdir())
        assert files == sorted(f"{drive.serial}.img" for drive in node.drives)


def test_new_serials_alone_would_be_old_data_on_new_drives(lab: Lab):
    with pytest.raises(UsageProblem, match="--new-serials"):
        renewal.check(off(lab), Change(new_serials=True))
