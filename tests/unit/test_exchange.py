"""Exchanging a member of an array that has its data a second time: what is done, and what is refused."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_removal import EIGHT, SWAP, absent, machine, name_of, swapped

from tunetool.node.array.drive_decisions import IGNORE, KEEP, REFUSE, TAKE, WIPE
from tunetool.node.common.commands import CommandError
from tunetool.node.common.drift import Ledger
from tunetool.node.common.refusal import Refusal
from tunetool.node.machine.drive_contents import Signature
from tunetool.node.plan.plan_file import REPLACE, document, dump, parse, volume, wipes
from tunetool.node.removal import exchange as module
from tunetool.node.removal.decision import Machine
from tunetool.node.removal.exchange import Exchange, carry_out, exchange_part, plan_exchange, with_slots


def redundant(node: Machine, level: str = "raid10") -> Machine:
    """The machine with its array made of this level; members that are gone leave their slots empty."""
    names = {drive.name for drive in node.drives if not drive.serial.startswith("NEW")}
    arrays = [
        replace(
            array,
            level=level,
            members=tuple(name if name in names else None for name in array.members),
        )
        for array in node.arrays
    ]
    manifest: dict[str, Any] = dict(node.manifest or {})
    return replace(node, arrays=arrays, manifest=dict(manifest, array=dict(manifest["array"], level=level)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return machine(tmp_path_factory.mktemp("built"))


def planned(node: Machine, **changes: Any) -> Exchange:
    answer = plan_exchange(node, replace(SWAP, **changes))
    assert answer is not None
    return answer


def verdicts(answer: Exchange) -> dict[str, str]:
    return {row.drive.serial: row.verdict for row in answer.decisions}


@pytest.mark.parametrize("level", ["raid1", "raid10"])
def test_a_drive_that_is_gone_is_exchanged_without_loss(whole: Machine, level: str) -> None:
    answer = planned(redundant(swapped(whole), level))
    assert (answer.problems, answer.old, answer.hashes) == ((), None, None)
    assert answer.new is not None
    assert answer.new.serial == "NEW"
    assert answer.serials == tuple("NEW" if serial == "LAB1NV3" else serial for serial in EIGHT)
    stay = {serial: KEEP for serial in EIGHT if serial != "LAB1NV3"}
    assert verdicts(answer) == {"LAB1SYS": IGNORE, "NEW": TAKE, **stay}
    plan = parse(dump(document({"n": exchange_part(answer, answer.note)}, "1", job=REPLACE)), "p", REPLACE)
    assert (wipes(plan, "n"), volume(plan, "n")) == ([], {})


def test_a_raid0_is_built_anew(whole: Machine) -> None:
    assert plan_exchange(swapped(whole), SWAP) is None
    assert plan_exchange(replace(whole, manifest=None), SWAP) is None


def test_an_old_drive_that_is_still_a_member_leaves(whole: Machine) -> None:
    both = redundant(replace(whole, drives=[*whole.drives, swapped(whole).drives[-1]]))
    answer = planned(both)
    assert answer.problems == ()
    assert answer.old is not None
    assert (answer.old.serial, verdicts(answer)["LAB1NV3"]) == ("LAB1NV3", IGNORE)


@pytest.mark.parametrize("how", ["gone", "being filled"])
def test_the_only_copy_does_not_leave(whole: Machine, how: str) -> None:
    both = redundant(replace(whole, drives=[*whole.drives, swapped(whole).drives[-1]]))
    partner = name_of(both, "LAB1NV4")
    array = both.arrays[0]
    if how == "gone":
        array = replace(array, members=tuple(None if name == partner else name for name in array.members))
    else:
        array = replace(array, rebuilding=(partner,))
    answer = planned(replace(both, arrays=[array]))
    assert "`LAB1NV3` holds the only copy of some of the data. hint: nothing was changed" in answer.problems[0]


def test_an_array_that_lost_more_than_it_can_is_left_alone(whole: Machine) -> None:
    answer = planned(redundant(absent(swapped(whole), "LAB1NV4")))
    assert "has lost more members than a RAID10 can. hint: nothing was changed; put one of them" in answer.problems[0]
    stopped = planned(replace(redundant(swapped(whole)), arrays=[]))
    assert "is not assembled. hint: nothing was changed; put its members back" in stopped.problems[0]
    assert {row.verdict for each in (answer, stopped) for row in each.decisions} == {IGNORE}


def test_one_of_two_that_are_gone_is_exchanged(whole: Machine) -> None:
    node = redundant(absent(swapped(whole), "LAB1NV5"))
    answer = planned(node)
    assert answer.problems == ()
    # md gives a new drive its first empty slot, which is not that of the drive that it came for.
    node = redundant(absent(swapped(whole), "LAB1NV5"))
    array = replace(
        node.arrays[0],
        members=(*tuple(name or "nvme3n2" for name in node.arrays[0].members[:4]), None, *node.arrays[0].members[5:]),
    )
    manifest: dict[str, Any] = dict(node.manifest or {})
    for leaving, absent_one in (("LAB1NV3", "LAB1NV5"), ("LAB1NV5", "LAB1NV3")):
        rows = with_slots(manifest, array, node.drives, leaving)["array"]["members"]
        serials = [row["serial"] for row in rows]
        assert serials == ["LAB1NV1", "LAB1NV2", "NEW", "LAB1NV4", absent_one, "LAB1NV6", "LAB1NV7", "LAB1NV8"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"new": "LAB1NV4"}, "is a member already"),
        ({"old": "LAB1NV9"}, "`LAB1NV9` is not a member. hint: the members are LAB1NV1"),
        ({"new": "NOWHERE"}, "serials not present: `NOWHERE`"),
        ({"criteria": replace(SWAP.criteria, serials=tuple(EIGHT))}, "`nvme_drives_serials` of the inventory"),
        ({"criteria": replace(SWAP.criteria, model="X*")}, "so it cannot become a member"),
    ],
)
def test_wrong_serials_exchange_nothing(whole: Machine, changes: dict[str, Any], word: str) -> None:
    node = redundant(swapped(whole))
    assert word in " ".join(planned(node, **changes).problems)


def test_a_smaller_drive_is_refused(whole: Machine) -> None:
    answer = planned(redundant(swapped(whole, size_bytes=2**31)))
    assert verdicts(answer)["NEW"] in (REFUSE, IGNORE)
    assert "so it cannot become a member" in answer.problems[0]


def test_a_new_drive_that_holds_something_needs_a_plan(whole: Machine) -> None:
    node = redundant(swapped(whole))
    node = replace(node, signatures={**node.signatures, "nvme3n2": [Signature("nvme3n2", "ext4", None, "1")]})
    assert "cannot be hashed" in planned(node).problems[0]
    answer = planned(node, hashes={"nvme3n2": "a" * 64})
    assert (answer.problems, verdicts(answer)["NEW"], answer.hashes) == ((), WIPE, {"NEW": "a" * 64})
    plan = document({"n": exchange_part(answer, answer.note)}, "1", job=REPLACE)
    assert wipes(plan, "n") == [{"serial": "NEW", "hash": "a" * 64}]


def test_a_run_that_was_cut_off_only_writes_the_manifest(whole: Machine) -> None:
    node = redundant(swapped(whole))
    array = node.arrays[0]
    filled = replace(array, members=tuple(name or "nvme3n2" for name in array.members), rebuilding=("nvme3n2",))
    node = replace(node, arrays=[filled])
    answer = planned(node)
    assert (answer.problems, answer.old, answer.new) == ((), None, None)
    document_after = with_slots(dict(node.manifest or {}), filled, node.drives, answer.leaving)
    after = planned(replace(node, manifest=document_after))
    assert after.note == "nothing to replace: `LAB1NV3` is no longer a member, `NEW` is one"


def test_a_second_run_of_an_exchange_changes_nothing(whole: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node = redundant(whole)
    answer = planned(node, old="GONE", new="LAB1NV3")
    monkeypatch.setattr(module, "read_arrays", lambda: node.arrays)
    monkeypatch.setattr(module, "read_drives", lambda: node.drives)
    monkeypatch.setattr(module, "run", lambda *_: pytest.fail("nothing is to be run"))
    monkeypatch.setattr(module, "write", lambda *_: pytest.fail("nothing is to be written"))
    manifest: dict[str, Any] = dict(node.manifest or {})
    turned = dict(manifest, array=dict(manifest["array"], members=manifest["array"]["members"][::-1]))
    ledger = Ledger(None, acting=True)
    assert (carry_out(answer, turned, {}, ledger), ledger.diff) == (EIGHT, [])


@pytest.mark.parametrize("failed", [False, True])
def test_the_old_drive_leaves_before_the_new_one_comes(
    whole: Machine, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    """Its label goes with it, and the manifest is written with the slot that md gave. One that md has failed is held by
    the array without a slot."""
    node = redundant(replace(whole, drives=[*whole.drives, swapped(whole).drives[-1]]))
    array, old = node.arrays[0], name_of(node, "LAB1NV3")
    slots = tuple(None if failed and name == old else name for name in array.members)
    array = replace(array, members=slots)
    node = replace(node, arrays=[array])
    answer = planned(node)
    now = [array]
    bound = {"nvme1n1", old}
    calls: list[tuple[str, ...]] = []
    documents: list[dict[str, Any]] = []

    def mdadm(call: list[str]) -> None:
        calls.append(tuple(call[1:]))
        if "--remove" in call:
            bound.remove(old)
            now[0] = replace(array, members=tuple(None if name == old else name for name in array.members))
        if "--zero-superblock" in call:
            assert old not in bound, "mdadm cannot open a drive that an array holds"
        if "--add" in call:
            now[0] = replace(array, members=tuple(name or "nvme3n2" for name in now[0].members))

    monkeypatch.setattr(module, "run", mdadm)
    monkeypatch.setattr(module, "read_arrays", lambda: now)
    monkeypatch.setattr(module, "disks_under", lambda _root, _device: bound)
    monkeypatch.setattr(module, "read_drives", lambda: node.drives)
    monkeypatch.setattr(module, "write", documents.append)
    for name in ("held", "unwatched"):
        monkeypatch.setattr(module, name, lambda _: contextlib.nullcontext())
    monkeypatch.setattr(module, "refuse_unless_blank", lambda drives, deep: calls.append(("looked at", drives[0].name)))
    serials = carry_out(answer, dict(node.manifest or {}), {}, Ledger(None, acting=True))
    assert calls == [
        ("looked at", "nvme3n2"),
        *([] if failed else [("--manage", "/dev/md127", "--fail", f"/dev/{old}")]),
        ("--manage", "/dev/md127", "--remove", f"/dev/{old}"),
        ("--zero-superblock", f"/dev/{old}"),
        ("--manage", "/dev/md127", "--add", "/dev/nvme3n2"),
    ]
    assert serials == [*EIGHT[:2], "NEW", *EIGHT[3:]]
    assert [member["serial"] for member in documents[0]["array"]["members"]] == serials
    calls.clear()
    carry_out(planned(node), dict(node.manifest or {}), {}, Ledger(None, acting=False))
    assert calls == []


def test_an_old_drive_that_takes_no_writes_leaves(whole: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node = redundant(whole)
    old = node.drives[[drive.serial for drive in node.drives].index("LAB1NV3")]

    def mdadm(call: list[str]) -> None:
        if "--zero-superblock" in call:
            raise CommandError("`mdadm` failed: cannot write")

    monkeypatch.setattr(module, "run", mdadm)
    monkeypatch.setattr(module, "read_arrays", lambda: node.arrays)
    for name in ("held", "unwatched"):
        monkeypatch.setattr(module, name, lambda _: contextlib.nullcontext())
    ledger = Ledger(None, acting=True)
    module._leave(node.arrays[0], old, ledger)
    assert ledger.warnings == ["`LAB1NV3` keeps its label: `mdadm` failed: cannot write. hint: pull it"]


def test_what_left_meanwhile_stops_the_exchange(whole: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    both = redundant(replace(whole, drives=[*whole.drives, swapped(whole).drives[-1]]))
    answer = planned(both)
    array = both.arrays[0]
    partner = name_of(both, "LAB1NV4")
    now = replace(array, members=tuple(None if name == partner else name for name in array.members))
    monkeypatch.setattr(module, "read_arrays", lambda: [now])
    monkeypatch.setattr(module, "run", lambda *_: pytest.fail("nothing is to be run"))
    assert answer.old is not None
    with pytest.raises(Refusal, match="holds the only copy of some of the data by now"):
        module._leave(array, answer.old, Ledger(None, acting=True))


@given(gone=st.sets(st.sampled_from(EIGHT)), level=st.sampled_from(["raid1", "raid10"]))
def test_no_exchange_ever_takes_the_last_copy(whole: Machine, gone: set[str], level: str) -> None:
    node = replace(whole, drives=[*whole.drives, swapped(whole).drives[-1]])
    for serial in sorted(gone):
        node = absent(node, serial)
    node = redundant(node, level)
    answer = planned(node)
    pairs = [EIGHT[n : n + 2] for n in range(0, 8, 2)] if level == "raid10" else [EIGHT]
    safe = all({*pair} - gone - {"LAB1NV3"} for pair in pairs)
    assert bool(answer.problems) == (not safe)


def test_the_page_of_a_refused_plan_wipes_nothing(whole: Machine, tmp_path: Path) -> None:
    answer = planned(redundant(absent(swapped(whole), "LAB1NV4")))
    part = exchange_part(answer, "refused")
    assert (part["array_action"], [drive["action"] for drive in part["drives"] if drive["action"] == WIPE]) == (
        "refuse",
        [],
    )
