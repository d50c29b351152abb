"""What an exchange of a member, a check of a level and a volume on each drive must not do, seen from outside."""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tunetool.node.array.array_checks import check_array, check_redundancy
from tunetool.node.array.drive_decisions import Criteria
from tunetool.node.array.drive_volumes import DriveVolume
from tunetool.node.array.md_arrays import Array, Superblock
from tunetool.node.common.check_result import FAIL
from tunetool.node.common.drift import Ledger
from tunetool.node.common.refusal import Refusal
from tunetool.node.machine.drive_contents import Signature
from tunetool.node.machine.drives import Drive, Link
from tunetool.node.removal import exchange
from tunetool.node.removal.decision import Machine
from tunetool.node.removal.drives import plan_several
from tunetool.node.removal.replacement import Swap, plan_replacement
from tunetool.node.volume.several import Volumes

OURS, THEIRS = "11111111:11111111:11111111:11111111", "22222222:22222222:22222222:22222222"


def a_drive(number: int, serial: str) -> Drive:
    """A drive as sysfs shows it, used by nobody."""
    return Drive(
        name=f"nvme{number}n1",
        serial=serial,
        model="MODEL",
        firmware="1",
        size_bytes=10**12,
        lba_bytes=512,
        metadata_bytes=0,
        transport="pcie",
        pci_address=f"0000:0{number}:00.0",
        numa_node=0,
        by_id=None,
        link=Link(),
        controller=f"nvme{number}",
    )


A, B, X = a_drive(0, "A"), a_drive(1, "B"), a_drive(2, "X")


def a_mirror(*members: str | None, state: str = "clean") -> Array:
    return Array("md127", OURS, "nvme_raid0", "raid1", 0, len(members), state, members, "9:127")


def a_label(drive: Drive, uuid: str, role: int) -> Superblock:
    return Superblock(drive.name, uuid, "nvme_raid0" if uuid == OURS else "backup", "raid1", 2, 0, role)


def the_node(array: Array, drives: list[Drive], blocks: list[Superblock], **others: Any) -> Machine:
    """A node that was built as a mirror of A and B."""
    manifest = {
        "array": {
            "uuid": OURS,
            "name": "nvme_raid0",
            "level": "raid1",
            "chunk_bytes": 0,
            "members": [A.member, B.member],
        },
        "filesystem": {"uuid": "u", "mount_point": "/mnt/nvme_raid0"},
    }
    return Machine(
        **{
            "drives": drives,
            "signatures": {
                block.device: [Signature(block.device, "linux_raid_member", None, None)] for block in blocks
            },
            "superblocks": {block.device: block for block in blocks},
            "arrays": [array],
            "under": {array.device: frozenset(name for name in array.members if name)},
            "inside": {},
            "manifest": manifest,
            "unreadable": {},
            **others,
        }
    )


SWAP = Swap("B", "X", Criteria(2), {})


def test_the_label_of_another_array_stays_on_the_old_drive() -> None:
    """It left the mirror long ago, and came back with somebody's data: nobody named that in a plan."""
    node = the_node(a_mirror(A.name, None), [A, B, X], [a_label(A, OURS, 0), a_label(B, THEIRS, 0)])

    planned = exchange.plan_exchange(node, SWAP)

    assert planned is not None
    assert planned.problems == ()
    assert planned.old is None
    assert planned.new == X


def test_a_drive_that_no_manifest_knows_is_left_alone() -> None:
    """The new drive is a member already, so the old one's serial was never asked for in the manifest."""
    array = a_mirror(A.name, X.name)
    stranger = a_drive(3, "Z")
    blocks = [a_label(A, OURS, 0), a_label(X, OURS, 1), a_label(stranger, THEIRS, 0)]

    planned = exchange.plan_exchange(the_node(array, [A, X, stranger], blocks), replace(SWAP, old="Z"))

    assert planned is not None
    assert planned.old is None


def test_the_old_drive_with_our_label_is_still_cleared() -> None:
    node = the_node(a_mirror(A.name, None), [A, B, X], [a_label(A, OURS, 0), a_label(B, OURS, 1)])

    planned = exchange.plan_exchange(node, SWAP)

    assert planned is not None
    assert planned.old == B


def test_nothing_is_exchanged_in_an_array_that_refuses_writes() -> None:
    """md takes a member out of it and adds none."""
    array = a_mirror(A.name, B.name, state="readonly")
    node = the_node(array, [A, B, X], [a_label(A, OURS, 0), a_label(B, OURS, 1)])

    planned = exchange.plan_exchange(node, SWAP)

    assert planned is not None
    assert "readonly" in "".join(planned.problems)


def test_a_stand_in_for_another_member_is_not_the_new_one() -> None:
    """X came for B, and the manifest does not know it yet: taking A out would leave one copy and an empty slot."""
    node = the_node(a_mirror(A.name, X.name), [A, X], [a_label(A, OURS, 0), a_label(X, OURS, 1)])

    planned = exchange.plan_exchange(node, replace(SWAP, old="A"))

    assert planned is not None
    assert planned.problems


def test_an_array_with_an_empty_slot_never_passes() -> None:
    """Also where every member of the manifest is there: somebody gave it a third slot."""
    wanted = {
        "uuid": OURS,
        "name": "nvme_raid0",
        "level": "raid1",
        "chunk_bytes": 0,
        "members": [A.member, B.member],
    }
    array = a_mirror(A.name, B.name, None)
    drives = {drive.name: drive for drive in (A, B)}

    checks = [*check_array(wanted, array, drives), *check_redundancy(wanted, array, drives)]

    assert FAIL in {check.status for check in checks}


def test_the_new_drive_of_a_volume_has_a_new_uuid() -> None:
    """The old one may come back to the node: two file systems with one UUID, and fstab would mount either."""
    volume = DriveVolume("drive1", "B", "33333333-3333-4333-8333-333333333333")
    drives = [A, X]
    volumes = {"A": DriveVolume("drive0", "A", "44444444-4444-4444-8444-444444444444"), "B": volume}
    node = Machine(drives, {}, {}, [], {}, {}, None, {}, volumes)

    removal = plan_replacement(node, "nvme_raid0", "/mnt/nvme_raid0", SWAP)

    assert removal.problems == ()
    noted = {each.serial: each for each in removal.noted}
    assert noted["X"].name == "drive1"
    assert noted["X"].uuid != volume.uuid
    assert noted["A"] == volumes["A"]


def test_a_serial_on_two_drives_is_refused_before_the_unmount() -> None:
    """Two paths to one namespace: which of them goes, nobody says."""
    uuid = "33333333-3333-4333-8333-333333333333"
    twins = [B, replace(a_drive(4, "B"))]
    labels = {drive.name: [Signature(drive.name, "xfs", "drive1", uuid)] for drive in twins}
    node = Machine([*twins, X], labels, {}, [], {}, {}, None, {}, {"B": DriveVolume("drive1", "B", uuid)})

    removal = plan_several(node, "/mnt/nvme_raid0")

    assert any("several drives" in problem for problem in removal.problems)


def test_a_drive_that_vanishes_leaves_fstab_alone(tmp_path: Path) -> None:
    """It was there when the array's task looked."""
    for name in ("etc", "proc/self", "mnt", "sys/block"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text("")
    (tmp_path / "etc/fstab").write_text("# mine\n")
    part = DriveVolume("drive0", "A", "33333333-3333-4333-8333-333333333333").part([A], True)
    wanted = {
        "array": "nvme_raid0",
        "mount_point": "/mnt/nvme_raid0",
        "offload_dir": "",
        "mount_options": [],
        "device_timeout": "30s",
        "protect_mount_point": False,
        "services": [],
        "adopt": False,
        "project_quota": False,
        "new_array": True,
        "volumes": [part],
    }
    ledger = Ledger(None, acting=False)

    with pytest.raises(Refusal, match="`A`"):
        Volumes(wanted, ledger, str(tmp_path)).all()
    assert ledger.diff == [] or all(entry["before_header"] != "/etc/fstab" for entry in ledger.diff)


@pytest.mark.parametrize("labels", [[], [Signature("nvme0n1", "xfs", None, "33333333-3333-4333-8333-333333333333")]])
def test_a_manifest_of_something_else_stops_no_volumes(
    monkeypatch: pytest.MonkeyPatch, labels: list[Signature]
) -> None:
    """That of an owner's volume, or one that is damaged. It stays where a drive has a volume: it may be of that."""
    pytest.importorskip("ansible", reason="Ansible's control side needs Python 3.11")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    module = importlib.import_module("plugins.modules.raid_array")
    steps: list[str] = []
    known = {"A": DriveVolume("drive0", "A", "33333333-3333-4333-8333-333333333333")}
    for name, stand_in in {
        "members_by_serial": lambda serials: [drive for drive in (A, B) if drive.serial in serials],
        "known_volumes": lambda groups: known,
        "built_manifest": lambda: None,
        "read_signatures": lambda names: labels,
        "contents_text": lambda drives: "",
        "held": lambda drives: contextlib.nullcontext(),
        "not_writable": lambda: [],
        "refuse_unless_blank": lambda drives, deep=False: None,
        "note": lambda volumes: steps.append("note"),
        "forget_volume": lambda: steps.append("forget"),
    }.items():
        monkeypatch.setattr(module, name, stand_in)
    asked = SimpleNamespace(
        params={"wipes": [], "serials": ["A", "B"], "name": "nvme_raid0", "groups": "drive"},
        check_mode=False,
        change_begins=lambda: steps.append("begins"),
    )

    module.converge_several(asked)

    assert list(dict.fromkeys(steps)) == (["begins", "note"] if labels else ["begins", "forget", "note"])
