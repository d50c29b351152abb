"""Drives that share a serial: known by more, the same in every place; and refused where they may be one."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from machines import RECORDED, lay_out
from tunetool.node.array.drive_decisions import REFUSE, Criteria
from tunetool.node.array.drive_selection import select
from tunetool.node.common.io_settings import ARGUMENTS
from tunetool.node.common.manifest import SCHEMA, validate
from tunetool.node.ephemeral.boot_decision import BUILD, Scene, decide, with_members
from tunetool.node.machine import recording
from tunetool.node.machine.block_stack import read_stack
from tunetool.node.machine.drives import read_drives
from tunetool.node.plan.plan_file import document, dump, host_part, parse
from tunetool.node.tuning.persistent_files import udev_rules
from tunetool.node.tuning.settings import normal_form

MANIFEST: dict[str, Any] = json.loads((RECORDED / "built-manifest.json").read_text())
GOOGLE = [f"nvme_card@0000:00:05.0-n{number}" for number in range(1, 9)]
EUI, UUID = "eui.0025384500000001", "uuid.6b2f0a1e-1d3e-4d41-8f3f-0a5a3e1e8c11"


@pytest.fixture
def google(tmp_path: Path) -> Path:
    """Eight namespaces of one controller, all with the serial `nvme_card`, and no identifiers of their own."""
    return lay_out("google-local-ssd", tmp_path)


def two(root: Path, *files: dict[str, str]) -> list[str]:
    """Identities of drives on a controller each, with the serial of a clone; ``files`` are relative to the namespace."""
    for number, texts in enumerate(files):
        device = root / f"sys/devices/pci0000:00/0000:0{number + 1}:00.0/nvme/nvme{number}"
        space = device / f"nvme{number}n1"
        space.mkdir(parents=True)
        for name, text in {"serial": "CLONE", "transport": "pcie", "address": f"0000:0{number + 1}:00.0"}.items():
            (device / name).write_text(text + "\n")
        (space / "device").symlink_to("..")
        for name, text in {"nsid": "1", **texts}.items():
            (space / name).write_text(text + "\n")
        (root / "sys/block").mkdir(parents=True, exist_ok=True)
        (root / f"sys/block/nvme{number}n1").symlink_to(f"../../{space.relative_to(root)}")
    return [drive.serial for drive in read_drives(str(root))]


def test_drives_of_one_serial_are_known_by_address_and_id(google: Path) -> None:
    drives = read_drives(str(google))
    assert [drive.serial for drive in drives] == GOOGLE
    assert len({drive.by_id for drive in drives}) == 8
    selection = select(drives, {}, Criteria(count=8), "nvme_raid0")
    assert [drive.serial for drive in selection.selected] == GOOGLE
    pinned = select(drives, {}, Criteria(count=2, serials=(GOOGLE[4], GOOGLE[1])), "nvme_raid0")
    assert [drive.serial for drive in pinned.selected] == [GOOGLE[1], GOOGLE[4]]


def test_plan_and_manifest_keep_it(google: Path) -> None:
    drives = read_drives(str(google))
    selection = select(drives, {}, Criteria(count=8), "nvme_raid0")
    part = host_part(selection, {}, {}, "create", "")
    plan = parse(dump(document({"n1": part}, "0")), "plan.json")
    assert [drive["serial"] for drive in plan["hosts"]["n1"]["drives"]] == GOOGLE
    written = with_members(MANIFEST, drives)
    assert validate(written, SCHEMA) == []
    assert [member["serial"] for member in written["array"]["members"]] == GOOGLE


def test_a_boot_makes_the_array_of_such_drives_again(google: Path) -> None:
    drives = read_drives(str(google))
    asked = {"model": "nvme_card", "size_bytes": drives[0].size_bytes, "transport": "pcie", "serials": []}
    finding = decide(MANIFEST, {"drives": asked}, Scene(drives))
    assert (finding.action, [drive.serial for drive in finding.members]) == (BUILD, GOOGLE)


def test_a_rule_of_udev_means_one_of_them(google: Path) -> None:
    tuning = normal_form({**dict.fromkeys(ARGUMENTS, ""), "scheduler": "none"})
    rules = udev_rules(tuning, [GOOGLE[2], f"CLONE:{EUI}", "S6AA1"], []).splitlines()[1:]
    assert [rule.partition('KERNEL=="nvme*", ')[2].partition(", ATTR{queue")[0] for rule in rules] == [
        f'ATTRS{{serial}}=="CLONE", ATTR{{wwid}}=="{EUI}"',
        'ATTRS{serial}=="S6AA1"',
        'ATTRS{serial}=="nvme_card", ATTRS{address}=="0000:00:05.0", ATTR{nsid}=="3"',
    ]


def test_the_stack_of_a_volume_knows_them_too(tmp_path: Path) -> None:
    root = lay_out("built", tmp_path)
    for path in root.glob("sys/devices/**/serial"):
        path.write_text("nvme_card\n")
        (path.parent / "subsysnqn").write_text(f"nqn.{path.parent.name}\n")
    known = [drive.serial for drive in read_drives(str(root)) if drive.arrays]
    labels = [leaf.label for leaf in read_stack("/mnt/nvme_raid0", str(root)).leaves]
    assert len(labels) == 8 == len(set(labels))
    assert sorted(labels) == sorted(known)


def test_an_identifier_of_its_own_comes_before_the_address(tmp_path: Path) -> None:
    assert two(tmp_path / "a", {"wwid": EUI}, {"wwid": UUID}) == [f"CLONE:{EUI}", f"CLONE:{UUID}"]
    guid = {"nguid": "00000000-0000-0001-0025-384500000002", "eui": "00 00 00 00 00 00 00 00"}
    zero = {"nguid": "00000000-0000-0000-0000-000000000000", "eui": "00 25 38 45 00 00 00 03"}
    assert two(tmp_path / "b", guid, zero) == [
        "CLONE:eui.00000000000000010025384500000002",
        "CLONE:eui.0025384500000003",
    ]


@pytest.mark.parametrize(
    "files",
    [
        [{}, {}],
        [{"../subsysnqn": "nqn.a"}, {"../subsysnqn": "nqn.a"}],
        [{"../subsysnqn": "nqn.a"}, {}],
        [{"wwid": EUI}, {"wwid": EUI}],
        [{"wwid": "nvme.1ae0-43-4c-00000001"}, {"wwid": "nvme.1ae0-43-4c-00000001"}],
        [{"../address": "traddr=10.0.0.1", "../subsysnqn": "nqn.a"}, {"../address": "traddr=10.0.0.2"}],
    ],
    ids=["nothing known", "one subsystem", "half known", "one id", "the kernel's id", "fabrics"],
)
def test_two_that_may_be_paths_to_one_stay_refused(files: list[dict[str, str]], tmp_path: Path) -> None:
    assert len(set(two(tmp_path, *files))) == 1
    selection = select(read_drives(str(tmp_path)), {}, Criteria(count=2), "nvme_raid0")
    assert selection.selected == ()
    assert {row.verdict for row in selection.decisions} == {REFUSE}
    assert "on 2 drives, which may be paths to one" in selection.decisions[0].reason


def test_clones_of_two_subsystems_are_two_drives(tmp_path: Path) -> None:
    known = two(tmp_path, {"../subsysnqn": "nqn.a"}, {"../subsysnqn": "nqn.b"})
    assert known == ["CLONE@0000:01:00.0-n1", "CLONE@0000:02:00.0-n1"]


def test_a_serial_of_its_own_stays_what_a_drive_is_known_by(tmp_path: Path) -> None:
    assert two(tmp_path / "one", {"wwid": EUI}) == ["CLONE"]
    drives = read_drives(str(lay_out("built", tmp_path / "built")))
    assert {member["serial"] for member in MANIFEST["array"]["members"]} < {drive.serial for drive in drives}
    without = [replace(drive, serial="", uses=(), arrays=(), idle_arrays=()) for drive in drives]
    assert {row.reason for row in select(without, {}, Criteria(count=9), "x").decisions} == {"has no serial number"}


def test_a_recording_keeps_what_they_are_known_by(google: Path, tmp_path: Path) -> None:
    for path in google.glob("sys/devices/pci*/*/nvme/nvme0/nvme0n*"):
        (path / "nsid").write_text(path.name[-1] + "\n")
        (path / "wwid").write_text(f"eui.00253845000000{path.name[-1]:0>2}\n")
    whole = recording.record(str(google))
    recording.lay_out(whole, str(tmp_path / "whole"))
    assert [drive.serial for drive in read_drives(str(tmp_path / "whole"))] == [
        f"nvme_card:eui.00253845000000{number:0>2}" for number in range(1, 9)
    ]
    hidden = recording.anonymous(whole)
    recording.lay_out(hidden, str(tmp_path / "hidden"))
    known = [drive.serial for drive in read_drives(str(tmp_path / "hidden"))]
    assert max(Counter(known).values()) == 1
    assert "0025384500" not in json.dumps(hidden)
    assert "nvme_card:" not in json.dumps(hidden["files"])
