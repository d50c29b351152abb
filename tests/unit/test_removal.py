"""Removing the volume: its parts, the obstacles, the permission by a plan, and processes that use it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machines import RECORDED, lay_out
from tunetool.node.array.drive_decisions import IGNORE, REFUSE, TAKE, WIPE, Criteria
from tunetool.node.array.md_arrays import Superblock, read_arrays
from tunetool.node.array.mdadm_conf import conf_with_array, conf_without_array
from tunetool.node.machine.busy import killed_by_a_reboot
from tunetool.node.machine.drive_contents import Signature, UnreadableDevice, refuse_suspended, write_problems
from tunetool.node.machine.drives import disks_under, read_drives
from tunetool.node.machine.fstab import with_entry, without_entry
from tunetool.node.machine.volume_users import occupants
from tunetool.node.plan.plan_file import REPLACE, TEARDOWN, PlanError, document, dump, parse, seal, volume, wipes
from tunetool.node.removal import facts
from tunetool.node.removal.decision import Machine, Removal, consent_problem, plan_removal, removal_part
from tunetool.node.removal.erasure import DISCARD, Way
from tunetool.node.removal.replacement import Swap, plan_replacement

NAME, POINT = "nvme_raid0", "/mnt/nvme_raid0"
OTHER = "11111111:22222222:33333333:44444444"
EIGHT = [f"LAB1NV{number}" for number in range(1, 9)]


def raid(device: str, uuid: str) -> Signature:
    return Signature(device, "linux_raid_member", f"node1:{NAME}", uuid, "0x1000")


def machine(root: Path, recorded: str = "built") -> Machine:
    """A node as it was recorded, with the labels that its manifest says are on its drives."""
    lay_out(recorded, root)
    slaves = root / "sys/devices/virtual/block/md127/slaves"
    slaves.mkdir(exist_ok=True)
    for number in range(1, 9):
        link = slaves / f"nvme{number}n1"
        if not link.is_symlink():
            link.symlink_to(os.path.relpath((root / f"sys/class/block/nvme{number}n1").resolve(), slaves))
    manifest = json.loads((RECORDED / "built-manifest.json").read_text())
    drives = read_drives(str(root))
    arrays = read_arrays(str(root))
    uuid, serials = manifest["array"]["uuid"], [member["serial"] for member in manifest["array"]["members"]]
    members = {drive.name: serials.index(drive.serial) for drive in drives if drive.serial in serials}
    system = next(drive.name for drive in drives if drive.serial not in serials)
    return Machine(
        drives=drives,
        signatures={system: [Signature(system, "ext4", None, "1")], **{name: [raid(name, uuid)] for name in members}},
        superblocks={
            name: Superblock(name, uuid, NAME, "raid0", 8, 2**20, role, "1.2", "Sat Nov 21 10:00:00 2026", 2**20)
            for name, role in members.items()
        },
        arrays=arrays,
        under={array.device: frozenset(disks_under(str(root), array.device)) for array in arrays},
        inside={
            array.device: [Signature(array.device, "xfs", NAME, manifest["filesystem"]["uuid"])]
            for array in arrays
            if array.serves
        },
        manifest=manifest,
        unreadable={},
    )


@pytest.fixture
def built(tmp_path: Path) -> Machine:
    return machine(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """The same for many examples: tests copy it and never change it."""
    return machine(tmp_path_factory.mktemp("built"))


def name_of(machine: Machine, serial: str) -> str:
    return next(drive.name for drive in machine.drives if drive.serial == serial)


def without(machine: Machine, serial: str) -> Machine:
    """The machine with this drive blank."""
    name = name_of(machine, serial)
    return replace(
        machine,
        drives=[
            replace(drive, uses=(), arrays=(), idle_arrays=()) if drive.name == name else drive
            for drive in machine.drives
        ],
        signatures={key: value for key, value in machine.signatures.items() if key != name},
        superblocks={key: value for key, value in machine.superblocks.items() if key != name},
        under={key: value - {name} for key, value in machine.under.items()},
    )


def absent(machine: Machine, serial: str) -> Machine:
    gone = without(machine, serial)
    return replace(gone, drives=[drive for drive in gone.drives if drive.serial != serial])


def remove(machine: Machine) -> Removal:
    return plan_removal(machine, NAME, POINT)


def verdicts(removal: Removal) -> dict[str, str]:
    return {row.drive.serial: row.verdict for row in removal.decisions}


def consent(removal: Removal) -> tuple[dict[str, str], dict[str, object]]:
    """The permission of a plan that is made now, as read from its file."""
    plan = parse(dump(document({"n": removal_part(removal, "")}, "0", job=TEARDOWN)), "p.json", TEARDOWN)
    return {entry["serial"]: entry["hash"] for entry in wipes(plan, "n")}, volume(plan, "n")


def test_the_members_go_and_the_ninth_drive_is_none_of_them(built: Machine) -> None:
    removal = remove(built)
    assert removal.problems == ()
    assert verdicts(removal) == {"LAB1SYS": IGNORE, **dict.fromkeys(EIGHT, WIPE)}
    assert consent_problem(removal, {}, None) == "nothing is removed without a plan"
    assert consent_problem(removal, *consent(removal)) is None


@pytest.mark.parametrize("manifest", [True, False], ids=["manifest", "no manifest"])
def test_a_volume_short_of_a_member_goes_as_well(tmp_path: Path, manifest: bool) -> None:
    lost = machine(tmp_path, "lost-drive")
    assert [array.serves for array in lost.arrays] == [False]
    lost = replace(lost, manifest=lost.manifest if manifest else None)
    removal = remove(lost)
    assert removal.problems == ()
    gone = [serial for serial in EIGHT if serial not in verdicts(removal)]
    assert len(gone) == 1
    assert list(removal.absent) == (gone if manifest else [])
    assert removal.inside is None
    assert consent_problem(removal, *consent(removal)) is None


@pytest.mark.parametrize(("state", "cure"), [("suspended", "a RAID0 has neither"), ("readonly", "mdadm --readwrite")])
@pytest.mark.parametrize("manifest", [True, False], ids=["manifest", "no manifest"])
def test_a_halted_array_is_refused_with_its_cure(built: Machine, manifest: bool, state: str, cure: str) -> None:
    halted = replace(
        built,
        arrays=[replace(array, state=state) for array in built.arrays],
        manifest=built.manifest if manifest else None,
    )
    problems = remove(halted).problems
    assert len(problems) == 1
    assert f"array `md127` is {state}: " in problems[0]
    assert cure in problems[0]


def test_the_look_at_a_suspended_array_reads_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A recorded machine: a read of the array would be an assertion here, and on a node it would never end.
    known = machine(tmp_path)
    state = tmp_path / "sys/class/block/md127/md/array_state"
    state.write_text("suspended\n")
    asked: list[str] = []

    def signatures(names: list[str]) -> list[Signature]:
        asked.extend(names)
        assert not any(name.startswith("md") for name in names)
        return [signature for name in names for signature in known.signatures.get(name, ())]

    monkeypatch.setattr(facts, "read_signatures", signatures)
    monkeypatch.setattr(facts, "read_unlabelled", lambda name, deep: [])
    monkeypatch.setattr(facts, "use_problems", lambda drives: {})
    monkeypatch.setattr(facts, "load", lambda: known.manifest)
    monkeypatch.setattr(facts, "examine", lambda names: known.superblocks)
    monkeypatch.setattr(facts, "has_capacity", lambda name: True)
    for name in ("read_drives", "read_arrays"):
        reader = getattr(facts, name)
        monkeypatch.setattr(facts, name, lambda reader=reader: reader(str(tmp_path)))
    monkeypatch.setattr(facts, "disks_under", lambda root, name: disks_under(str(tmp_path), name))
    seen, _ = facts.look()
    assert {drive.name for drive in seen.drives} <= set(asked)
    assert seen.inside == {}
    assert "md127` is suspended" in facts.describe(remove(seen), [])


@pytest.mark.parametrize("serial", ["LAB1NV5", "NEW"])
def test_a_drive_without_writes_ends_a_replacement_at_once(
    serial: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = swapped(machine(tmp_path))
    drive = next(drive for drive in built.drives if drive.serial == serial)
    (tmp_path / "sys/block" / drive.name).mkdir(parents=True, exist_ok=True)
    (tmp_path / "sys/block" / drive.name / "ro").write_text("1\n")
    monkeypatch.setattr(facts, "read_drives", lambda: built.drives)
    monkeypatch.setattr(facts, "read_arrays", lambda: built.arrays)
    monkeypatch.setattr(facts, "load", lambda: built.manifest)
    monkeypatch.setattr(facts, "examine", lambda names: built.superblocks)
    monkeypatch.setattr(facts, "has_capacity", lambda name: False)
    monkeypatch.setattr(facts, "disks_under", lambda root, name: built.under[name])
    monkeypatch.setattr(facts, "read_unlabelled", lambda name, deep: [])
    monkeypatch.setattr(facts, "contents_hash", lambda drive: "hash")
    monkeypatch.setattr(facts, "use_problems", lambda drives: {})
    monkeypatch.setattr(facts, "write_problems", lambda drives: write_problems(drives, str(tmp_path)))
    monkeypatch.setattr(
        facts, "read_signatures", lambda names: [each for name in names for each in built.signatures.get(name, ())]
    )
    seen, hashes = facts.look("NEW")
    replacement = plan_replacement(seen, NAME, POINT, replace(SWAP, hashes=hashes))
    assert replacement.problems
    (row,) = [row for row in replacement.decisions if row.drive.serial == serial]
    assert (row.verdict, row.reason) == (REFUSE, f"read-only: the kernel refuses every write to `/dev/{drive.name}`")


@pytest.mark.parametrize("name", ["md127", "md127p1"])
def test_labels_of_a_suspended_array_are_not_asked_for(tmp_path: Path, name: str) -> None:
    machine(tmp_path)
    array = (tmp_path / "sys/class/block/md127").resolve()
    (array / "md/array_state").write_text("suspended\n")
    (array / "md127p1").mkdir()
    (tmp_path / "sys/class/block/md127p1").symlink_to(array / "md127p1")
    with pytest.raises(UnreadableDevice, match=f"`{name}` is suspended"):
        refuse_suspended([name], str(tmp_path))
    (array / "md/array_state").write_text("clean\n")
    refuse_suspended([name, "nvme1n1", "nothing"], str(tmp_path))


def test_a_node_with_nothing_of_ours_needs_nothing(built: Machine) -> None:
    blank = replace(built, manifest=None, superblocks={})
    assert remove(blank).done
    assert set(verdicts(remove(blank)).values()) == {IGNORE}


def test_a_run_that_was_cut_goes_on_with_the_same_plan(built: Machine) -> None:
    allowed = consent(remove(built))
    cut = replace(built, inside={})  # the file system is gone, and then one member after the other
    for serial in EIGHT:
        assert consent_problem(remove(cut), *allowed) is None
        cut = without(cut, serial)
        assert verdicts(remove(cut))[serial] == IGNORE
    # All drives are blank: nothing can be lost, but there are files to remove.
    assert (consent_problem(remove(cut), {}, None), remove(cut).done) == (None, False)


def test_drives_that_are_out_of_sight_need_consent(built: Machine) -> None:
    for serial in EIGHT:
        built = absent(built, serial)
    removal = remove(built)
    assert consent_problem(removal, {}, None) == "nothing is removed without a plan"
    assert consent_problem(removal, *consent(removal)) is None


def rebuilt(machine: Machine, **changes: object) -> Machine:
    blocks = {name: replace(block, **changes) for name, block in machine.superblocks.items()}  # type: ignore[arg-type]
    return replace(machine, superblocks=blocks)


@pytest.mark.parametrize("changes", [{"created": "Sun Nov 22 10:00:00 2026"}, {"chunk_bytes": 2**19}, {"role": 1}])
def test_a_plan_is_stale_for_an_array_that_was_made_anew(built: Machine, changes: dict[str, object]) -> None:
    allowed = consent(remove(built))
    problem = consent_problem(remove(rebuilt(built, **changes)), *allowed)
    assert problem is not None
    assert "not what the plan saw: drive `LAB1NV" in problem


def test_a_plan_is_stale_for_another_file_system(built: Machine) -> None:
    allowed = consent(remove(built))
    other = {device: [replace(signatures[0], uuid="other")] for device, signatures in built.inside.items()}
    assert "holds something else since" in str(consent_problem(remove(replace(built, inside=other)), *allowed))


def test_a_plan_says_which_drives_are_erased_and_how(built: Machine) -> None:
    removal = remove(built)
    assert "erased" not in facts.describe(removal, [])
    ways = tuple(Way(drive, DISCARD, 0) for drive in removal.members)
    text = facts.describe(replace(removal, erase=DISCARD, ways=ways), [])
    assert text.count("discard; discarded blocks read as bytes 0x00") == len(removal.members) == 8
    assert f"  `{removal.members[0].serial}` ({removal.members[0].name}): discard" in text


def test_a_plan_is_stale_for_another_way_to_erase(built: Machine) -> None:
    for planned, wanted in (("none", "crypto"), ("discard", "none")):
        wipes_, volume_ = consent(replace(remove(built), erase=planned))
        assert consent_problem(replace(remove(built), erase=planned), wipes_, volume_) is None
        problem = consent_problem(replace(remove(built), erase=wanted), wipes_, volume_)
        assert problem == f"not what the plan saw: it has `teardown_erase: {planned}`, this run `{wanted}`"
    # A plan of an older version.
    del volume_["erase"]
    assert consent_problem(remove(built), wipes_, volume_) is None


def test_a_plan_that_saw_no_inside_gives_none_up(built: Machine) -> None:
    allowed = consent(remove(replace(built, inside={})))
    assert "holds something else since" in str(consent_problem(remove(built), *allowed))


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ("other array", "where the manifest has a member of another array"),
        ("more labels", "holds more than the array: ext4"),
        ("stranger", "is in an array with drives of another: nvme0n1"),
        ("unlisted", "is not in the manifest"),
        ("lvm", "member of `dm-0`"),
        ("unreadable", "cannot be read"),
    ],
)
def test_one_member_that_is_not_as_the_manifest_says_bars_all(built: Machine, how: str, word: str) -> None:
    name = name_of(built, "LAB1NV4")
    if how == "other array":
        block = replace(built.superblocks[name], uuid=OTHER)
        built = replace(
            built,
            superblocks={**built.superblocks, name: block},
            signatures={**built.signatures, name: [raid(name, OTHER)]},
        )
    elif how == "more labels":
        more = [*built.signatures[name], Signature(name, "ext4", None, "2")]
        built = replace(built, signatures={**built.signatures, name: more})
    elif how == "stranger":
        built = replace(built, under={array: names | {"nvme0n1"} for array, names in built.under.items()})
    elif how == "unlisted":
        system = next(drive.name for drive in built.drives if drive.serial == "LAB1SYS")
        built = replace(built, superblocks={**built.superblocks, system: built.superblocks[name]})
    elif how == "lvm":
        drives = [
            replace(drive, uses=(*drive.uses, "member of `dm-0`")) if drive.name == name else drive
            for drive in built.drives
        ]
        built = replace(built, drives=drives)
    else:
        built = replace(built, unreadable={name: "cannot be read: broken"})
    removal = remove(built)
    assert word in " ".join(removal.problems)
    assert wipes({"job": TEARDOWN, "hosts": {"n": removal_part(removal, "")}}, "n") == []


@given(
    situations=st.lists(st.sampled_from(["member", "blank", "absent", "other"]), min_size=8, max_size=8),
    named=st.sets(st.sampled_from(EIGHT)),
)
def test_nothing_is_wiped_but_members_that_the_plan_names(
    whole: Machine, situations: list[str], named: set[str]
) -> None:
    node = whole
    for serial, situation in zip(EIGHT, situations, strict=True):
        if situation == "blank":
            node = without(node, serial)
        elif situation == "absent":
            node = absent(node, serial)
        elif situation == "other":
            name = name_of(node, serial)
            node = without(node, serial)
            node = replace(node, signatures={**node.signatures, name: [Signature(name, "ext4", None, "3")]})
    removal = remove(node)
    doomed = [drive.serial for drive in removal.members]
    assert doomed == [serial for serial, situation in zip(EIGHT, situations, strict=True) if situation == "member"]
    assert bool(removal.problems) == ("other" in situations)
    hashes, what = consent(remove(whole))
    problem = consent_problem(removal, {serial: hashes[serial] for serial in named}, what)
    assert (problem is None) == (set(doomed) <= named)


# --- replacing ---

CRITERIA = Criteria(count=8, model="QEMU NVMe Ctrl", size_bytes=4 * 2**30, transport="pcie")
SWAP = Swap("LAB1NV3", "NEW", CRITERIA, {})


def swapped(machine: Machine, **changes: object) -> Machine:
    """LAB1NV3 is pulled, and a blank drive sits in its slot."""
    old = next(drive for drive in machine.drives if drive.serial == "LAB1NV3")
    new = replace(old, serial="NEW", name="nvme3n2", uses=(), arrays=(), idle_arrays=(), **changes)  # type: ignore[arg-type]
    gone = absent(machine, "LAB1NV3")
    return replace(gone, drives=[*gone.drives, new])


def test_a_new_drive_takes_the_old_ones_slot(built: Machine) -> None:
    replacement = plan_replacement(swapped(built), NAME, POINT, SWAP)
    assert replacement.problems == ()
    assert replacement.serials == tuple("NEW" if serial == "LAB1NV3" else serial for serial in EIGHT)
    assert verdicts(replacement) == {
        "LAB1SYS": IGNORE,
        "NEW": TAKE,
        **{serial: WIPE for serial in EIGHT if serial != "LAB1NV3"},
    }


def test_an_old_drive_that_is_still_there_loses_its_label_too(built: Machine) -> None:
    both = swapped(built)
    replacement = plan_replacement(replace(built, drives=[*built.drives, both.drives[-1]]), NAME, POINT, SWAP)
    assert replacement.problems == ()
    assert "LAB1NV3" in [drive.serial for drive in replacement.members]
    assert "LAB1NV3" not in replacement.serials


def test_a_new_drive_that_holds_something_needs_its_own_consent(built: Machine) -> None:
    node = swapped(built)
    node = replace(node, signatures={**node.signatures, "nvme3n2": [raid("nvme3n2", OTHER)]})
    replacement = plan_replacement(node, NAME, POINT, replace(SWAP, hashes={"nvme3n2": "a" * 64}))
    assert (replacement.incoming and replacement.incoming.serial, replacement.problems) == ("NEW", ())
    hashes, what = consent(replacement)
    assert hashes["NEW"] == "a" * 64
    assert consent_problem(replacement, hashes, what) is None
    later = plan_replacement(node, NAME, POINT, replace(SWAP, hashes={"nvme3n2": "b" * 64}))
    assert "drive `NEW` changed since" in str(consent_problem(later, hashes, what))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"size_bytes": 2 * 2**30}, "size 2 GiB is not 4 GiB"),
        ({"size_bytes": 4 * 2**30 - 2**20}, "differs from the others'"),
        ({"lba_bytes": 4096}, "logical block of 4096 bytes"),
        ({"metadata_bytes": 8}, "metadata"),
        ({"model": "Other"}, "model is not"),
        ({"transport": "tcp"}, "transport `tcp`"),
    ],
    ids=str,
)
def test_a_new_drive_that_could_not_be_built_with_bars_all(
    built: Machine, changes: dict[str, object], word: str
) -> None:
    replacement = plan_replacement(swapped(built, **changes), NAME, POINT, SWAP)
    assert replacement.problems
    row = next(row for row in replacement.decisions if row.drive.serial == "NEW")
    assert row.verdict == REFUSE
    assert word in row.reason


@pytest.mark.parametrize(
    ("swap", "word"),
    [
        (replace(SWAP, new="LAB1NV4"), "is a member already"),
        (replace(SWAP, old="LAB1NV9"), "`LAB1NV9` is not a member. hint: the members are LAB1NV1"),
        (replace(SWAP, new="NOWHERE"), "serials not present: `NOWHERE`"),
        (replace(SWAP, new=""), "serials not present"),
        (replace(SWAP, criteria=replace(CRITERIA, count=7)), "7 drives asked for, 8 match"),
        (replace(SWAP, criteria=replace(CRITERIA, serials=tuple(EIGHT))), "`nvme_drives_serials` of the inventory"),
    ],
    ids=["member", "no member", "absent", "empty", "count", "pinned"],
)
def test_wrong_serials_bar_all(built: Machine, swap: Swap, word: str) -> None:
    assert word in " ".join(plan_replacement(swapped(built), NAME, POINT, swap).problems)


def test_a_new_drive_in_use_or_twice_there_bars_all(built: Machine) -> None:
    node = swapped(built)
    used = [replace(drive, uses=("mounted at `/x`",)) if drive.serial == "NEW" else drive for drive in node.drives]
    twice = [*node.drives, replace(node.drives[-1], name="nvme9n1")]
    for drives in (used, twice):
        assert plan_replacement(replace(node, drives=drives), NAME, POINT, SWAP).problems


def test_two_drives_gone_are_not_replaced_by_one(built: Machine) -> None:
    replacement = plan_replacement(absent(swapped(built), "LAB1NV5"), NAME, POINT, SWAP)
    assert "more members are absent: `LAB1NV5`" in " ".join(replacement.problems)


def test_a_drive_that_was_replaced_is_left_alone(built: Machine) -> None:
    replacement = plan_replacement(built, NAME, POINT, replace(SWAP, old="LAB0OLD", new="LAB1NV3"))
    assert (replacement.done, replacement.problems, replacement.serials) == (True, (), tuple(EIGHT))
    assert "`LAB0OLD` is no longer a member, `LAB1NV3` is one" in replacement.note


def test_a_replacement_that_was_cut_before_the_manifest_goes_on(built: Machine) -> None:
    node = swapped(built)
    blocks = {name: replace(block, uuid=OTHER) for name, block in node.superblocks.items()}
    blocks["nvme3n2"] = replace(next(iter(blocks.values())), device="nvme3n2", role=2)
    replacement = plan_replacement(replace(node, superblocks=blocks), NAME, POINT, SWAP)
    assert (replacement.done, replacement.problems) == (True, ())
    assert "NEW" in replacement.serials
    # With one member of another array it is unknown what these drives are.
    blocks["nvme3n2"] = replace(blocks["nvme3n2"], uuid="55555555:0:0:0")
    assert plan_replacement(replace(node, superblocks=blocks), NAME, POINT, SWAP).problems


# --- the file ---


def test_a_plan_of_one_job_names_its_own_playbook(built: Machine) -> None:
    text = dump(document({"n": removal_part(remove(built), "")}, "0", job=TEARDOWN))
    for job in (REPLACE, "provision"):
        with pytest.raises(
            PlanError, match=r"is for `ansible-playbook tunetool\.node\.teardown`, not for .* hint: apply it with"
        ):
            parse(text, "p.json", job)
    plan = json.loads(text)
    for bad in ("format", None):
        plan["job"] = bad
        plan["sha256"] = seal(plan)
        with pytest.raises(PlanError, match="is for no job of this version"):
            parse(json.dumps(plan), "p.json", TEARDOWN)


def test_a_forged_volume_is_refused(built: Machine) -> None:
    plan = json.loads(dump(document({"n": removal_part(remove(built), "")}, "0", job=TEARDOWN)))
    plan["hosts"]["n"]["volume"]["hash"] = "any"
    plan["sha256"] = seal(plan)
    with pytest.raises(PlanError, match=r"`n` is not one .*: `ansible-playbook tunetool\.node\.teardown --tags plan"):
        parse(json.dumps(plan), "p.json", TEARDOWN)


# --- lines that go, and lines that stay ---

LINES = st.lists(st.sampled_from(["# a comment", "", "UUID=1 / ext4 defaults 0 1", "/dev/sdb /x xfs noauto 0 0"]))


@given(before=LINES, after=LINES)
def test_only_our_line_leaves_fstab(before: list[str], after: list[str]) -> None:
    text = "".join(line + "\n" for line in [*before, *after])
    ours = with_entry("".join(line + "\n" for line in before), "UUID=u-2", POINT, "xfs", "nofail")
    assert without_entry(ours + "".join(line + "\n" for line in after), "u-2") == text
    assert without_entry(text, "u-2") == text


def test_only_our_line_leaves_mdadm_conf() -> None:
    text = f"DEVICE partitions\nARRAY /dev/md/theirs metadata=1.2 UUID={OTHER}\nHOMEHOST <system>"
    ours = conf_with_array(text + "\n", NAME, "1:2:3:4")
    assert conf_without_array(ours, "1:2:3:4") == text + "\n"
    assert conf_without_array(text, "1:2:3:4") == text


# --- who is at work on the volume ---

MOUNT = f"40 1 9:127 / {POINT} rw - xfs /dev/md127 rw\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A node with the volume mounted, and one process that has nothing to do with it."""
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/mnt").symlink_to("mnt:[1]")
    (tmp_path / "proc/self/mountinfo").write_text("20 1 8:1 / / rw shared:1 - ext4 /dev/vda rw\n" + MOUNT)
    process(tmp_path, 10, "idle")
    return tmp_path


def process(root: Path, pid: int, name: str, namespace: str = "mnt:[1]", mounts: str = MOUNT) -> Path:
    base = root / f"proc/{pid}"
    for folder in ("ns", "fd", "fdinfo"):
        (base / folder).mkdir(parents=True)
    (base / "comm").write_text(name + "\n")
    (base / "ns/mnt").symlink_to(namespace)
    (base / "mountinfo").write_text("20 1 8:1 / / rw - ext4 /dev/vda rw\n" + mounts)
    for link in ("cwd", "root"):
        (base / link).symlink_to("/")
    (base / "fd/3").symlink_to("/mnt/nvme_raid0_other/file")
    (base / "fdinfo/3").write_text("pos:\t0\nmnt_id:\t20\n")
    (base / "maps").write_text("7f00-7f01 r--p 00000000 08:01 12 /usr/bin/x\n")
    return base


def busy(root: Path) -> list[str]:
    return occupants("9:127", "md127", POINT, str(root))


def test_nobody_at_work_is_nobody(proc: Path) -> None:
    assert busy(proc) == []


@pytest.mark.parametrize("how", ["fd", "deleted", "cwd", "maps", "container"])
def test_a_process_is_named_with_what_it_holds(proc: Path, how: str) -> None:
    elsewhere = how == "container"
    base = process(
        proc, 77, "train", "mnt:[2]" if elsewhere else "mnt:[1]", MOUNT.replace(POINT, "/data") if elsewhere else MOUNT
    )
    words = {"fd": "open file", "deleted": "open file", "cwd": "working directory", "maps": "mapped file"}
    if how in ("fd", "deleted"):
        (base / "fd/4").symlink_to(POINT + "/x" + (" (deleted)" if how == "deleted" else ""))
        (base / "fdinfo/4").write_text("pos:\t0\nflags:\t02\nmnt_id:\t40\n")
    elif how == "cwd":
        (base / "cwd").unlink()
        (base / "cwd").symlink_to(POINT)
    elif how == "maps":
        (base / "maps").write_text(f"7f00-7f01 r--p 00000000 09:7f 12 {POINT}/lib.so\n")
    (line,) = busy(proc)
    assert line.startswith("process 77 `train` (")
    assert words.get(how, "keeps its own mount") in line


OVERLAYS = {
    "upper": f"lowerdir=/usr,upperdir={POINT}/up,workdir=/var/wk",
    "a lower one of several": f"lowerdir=/a\\\\:b:{POINT}/low:/usr",
    "each by its own option": f"lowerdir+=/usr,datadir+={POINT}/low",
}


@pytest.mark.parametrize("layers", OVERLAYS.values(), ids=OVERLAYS)
def test_an_overlay_with_layers_in_it_is_in_the_way(proc: Path, layers: str) -> None:
    """The kernel mounts these once more for itself: no list of mounts has that, and umount succeeds."""
    overlay = f"70 20 0:60 / /merged rw - overlay overlay rw,{layers},index=off\n"
    with (proc / "proc/self/mountinfo").open("a") as stream:
        stream.write(overlay)
    process(proc, 78, "udevd", "mnt:[3]", overlay)
    assert busy(proc) == ["`/merged`, a mount of overlay, has its directories in it"]
    shutil.rmtree(proc / "proc/78")
    (proc / "proc/self/mountinfo").write_text("20 1 8:1 / / rw shared:1 - ext4 /dev/vda rw\n" + MOUNT)
    process(proc, 79, "sleep", "mnt:[4]", overlay.replace("/merged", "/"))
    assert busy(proc) == ["process 79 `sleep` (keeps `/`, a mount of overlay, whose directories are in it)"]


def test_an_overlay_of_other_directories_is_not_in_the_way(proc: Path) -> None:
    layers = f"lowerdir=/usr:{POINT}_other,upperdir=/up,workdir=relative"
    with (proc / "proc/self/mountinfo").open("a") as stream:
        stream.write(f"70 20 0:60 / /merged rw - overlay {POINT} rw,{layers}\n71 20 0:61 / /m2 rw - tmpfs tmpfs rw\n")
    assert busy(proc) == []


def test_a_namespace_that_follows_the_node_is_not_in_the_way(proc: Path) -> None:
    process(proc, 78, "systemd-udevd", "mnt:[3]", MOUNT.replace(" rw - ", " rw master:5 - "))
    assert busy(proc) == []


def test_a_namespace_that_may_not_be_read_is_no_other_namespace(proc: Path) -> None:
    base = process(proc, 1, "init")
    (base / "ns/mnt").unlink()
    assert busy(proc) == []
    (base / "cwd").unlink()
    (base / "cwd").symlink_to(POINT)
    assert busy(proc) == ["process 1 `init` (working directory)"]


def test_names_of_any_bytes_are_in_the_way(proc: Path) -> None:
    odd = "a\vb\u2028c\xa0d\udcfc"
    mounts = (proc / "proc/self/mountinfo").read_bytes()
    inner = f"50 40 0:9 / {POINT}/{odd} rw - tmpfs  rw\n".encode("utf-8", "surrogateescape")
    (proc / "proc/self/mountinfo").write_bytes(mounts + inner)
    swaps = f"Filename\tType\n{POINT}/{odd}\\040x          file\t1 0 -2\n"
    (proc / "proc/swaps").write_bytes(swaps.encode("utf-8", "surrogateescape"))
    expected = [f"`{POINT}/{odd}` is mounted in it", f"swap file `{POINT}/{odd} x`"]
    assert occupants("9:127", "md127", POINT + "/", str(proc)) == expected


@pytest.mark.parametrize(
    "over",
    ["", "60 20 0:50 / /mnt rw - tmpfs t rw\n", f"60 40 0:50 / {POINT} rw - tmpfs t rw\n"],
    ids=["it shows", "a mount over its parent", "a mount over it"],
)
def test_a_reboot_would_end_a_process_on_a_hidden_volume(proc: Path, over: str) -> None:
    table = f"20 1 8:1 / / rw shared:1 - ext4 /dev/vda rw\n{MOUNT.replace('40 1', '40 20')}{over}"
    (proc / "proc/self/mountinfo").write_text(table)
    device = proc / "sys/dev/block"
    device.mkdir(parents=True)
    (device / "9:127").symlink_to("../../devices/virtual/block/md127")
    assert killed_by_a_reboot(POINT, {}, str(proc)) == []
    base = process(proc, 77, "train", mounts=MOUNT + over)
    (base / "fd/4").symlink_to(f"{POINT}/x")
    (base / "fdinfo/4").write_text("pos:\t0\nflags:\t02\nmnt_id:\t40\n")
    line = f"`{POINT}/`: process 77 `train` (open file `{POINT}/x`)"
    assert killed_by_a_reboot(f"{POINT}/", {}, str(proc)) == [line]


def test_the_trigger_of_an_automount_is_no_volume(proc: Path) -> None:
    """systemd keeps the directory of an automount open, whose mount lies below that of the volume."""
    trigger = f"39 20 0:40 / {POINT} rw - autofs systemd-1 rw\n"
    (proc / "proc/self/mountinfo").write_text(
        f"20 1 8:1 / / rw shared:1 - ext4 /dev/vda rw\n{trigger}{MOUNT.replace('40 1', '40 39')}"
    )
    base = process(proc, 1, "systemd", mounts=trigger + MOUNT)
    (base / "fd/4").symlink_to(POINT)
    (base / "fdinfo/4").write_text("pos:\t0\nflags:\t02\nmnt_id:\t39\n")
    assert killed_by_a_reboot(POINT, {}, str(proc)) == []


def test_a_volume_mounted_twice_at_one_place_is_in_the_way(proc: Path) -> None:
    with (proc / "proc/self/mountinfo").open("a") as stream:
        stream.write(MOUNT.replace("40 1", "41 40"))
    assert busy(proc) == [f"it is also mounted at `{POINT}`"]


def test_mounts_swap_and_loops_within_are_in_the_way(proc: Path) -> None:
    with (proc / "proc/self/mountinfo").open("a") as stream:
        stream.write(f"50 40 0:9 / {POINT}/inner rw - tmpfs tmpfs rw\n51 1 9:127 /x /srv/x rw - xfs /dev/md127 rw\n")
    (proc / "proc/swaps").write_text(f"Filename Type Size Used Priority\n{POINT}/swap file 1 0 -2\n")
    loop = proc / "sys/block/loop0/loop"
    loop.mkdir(parents=True)
    (loop / "backing_file").write_text(f"{POINT}/image\n")
    text = " ".join(busy(proc))
    for word in (f"`{POINT}/inner`", "`/srv/x`", f"swap file `{POINT}/swap`", "`loop0`"):
        assert word in text
