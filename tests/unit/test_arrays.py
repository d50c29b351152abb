"""Decisions about an array, and its entries in configuration files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import nvme_drive
from machines import ARRAY_CURES
from tunetool.node.array import create
from tunetool.node.array.build import ArrayRefusal, Facts, decide_build
from tunetool.node.array.drift import Asked, built_array, compare_array
from tunetool.node.array.md_arrays import Array, Superblock, Wanted, decide, examine, parse_examine, read_arrays
from tunetool.node.array.mdadm_conf import conf_with_array
from tunetool.node.common.commands import CommandError, NotInstalled
from tunetool.node.common.drift import Difference, Drifted
from tunetool.node.common.raid_levels import (
    ACCEPTED,
    LEVELS,
    RAID0,
    RAID1,
    RAID10,
    Level,
    canonical,
    copies,
    data_members,
    needs_every_member,
    with_layout,
)

UUID = "2d1e0b40:129b6514:c5540f43:066bc3a1"
NAMES = tuple(f"nvme{number}n1" for number in range(1, 9))
WANTED = Wanted("nvme_raid0", "raid0", 2**20, NAMES)
SUPERBLOCKS = {name: Superblock(name, UUID, "nvme_raid0", "raid0", 8, 2**20, slot) for slot, name in enumerate(NAMES)}
ASSEMBLED = Array("md127", UUID, "nvme_raid0", "raid0", 2**20, 8, "clean", NAMES, "9:127")


@pytest.mark.parametrize("blank", ["", "echo 'mdadm: No md superblock detected on /dev/nvme1n1.' >&2; exit 1"])
def test_a_device_that_mdadm_cannot_open_is_no_blank_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blank: str
) -> None:
    """Answers of mdadm 4.2: its exit status is 1 for a blank device, and for one that it cannot open."""
    program = tmp_path / "mdadm"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def mdadm(script: str) -> None:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    mdadm(blank)
    assert examine(["nvme1n1"]) == {}
    mdadm(f"echo 'mdadm: cannot open /dev/nvme2n1: Permission denied' >&2; {blank or 'exit 1'}")
    with pytest.raises(CommandError, match="cannot open /dev/nvme2n1: Permission denied") as caught:
        examine(["nvme1n1", "nvme2n1"])
    assert not isinstance(caught.value, NotInstalled)


def test_blank_members_become_an_array() -> None:
    assert decide(WANTED, {}, []).action == "create"


def test_the_same_array_is_kept() -> None:
    assert decide(WANTED, SUPERBLOCKS, [ASSEMBLED]).action == "keep"


def test_an_array_that_is_not_assembled_is_assembled() -> None:
    assert decide(WANTED, SUPERBLOCKS, []).action == "assemble"
    assert decide(WANTED, SUPERBLOCKS, [replace(ASSEMBLED, state="inactive", members=())]).action == "assemble"


@pytest.mark.parametrize(
    ("state", "disks", "stopped"),
    [
        ("inactive", {"nvme1n1"}, True),
        ("inactive", {"nvme1n1", "nvme9n1"}, False),  # it has a disk that is not ours
        ("clean", {"nvme1n1"}, False),
    ],
)
def test_what_udev_began_is_stopped_before_all_are_assembled(
    monkeypatch: pytest.MonkeyPatch, state: str, disks: set[str], stopped: bool
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(create, "run", ran.append)
    monkeypatch.setattr(create, "disks_under", lambda root, array: disks)
    monkeypatch.setattr(create, "read_arrays", lambda: [replace(ASSEMBLED, uuid=None, state=state, members=())])
    create.assemble("nvme_raid0", UUID, [nvme_drive(1, idle_arrays=("md127",)), nvme_drive(2)])
    begun = [["mdadm", "--stop", "/dev/md127"]] if stopped else []
    assert ran == [
        *begun,
        ["mdadm", "--assemble", "/dev/md/nvme_raid0", f"--uuid={UUID}", "/dev/nvme1n1", "/dev/nvme2n1"],
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"level": "raid5"}, "level: expected raid0, found raid5"),
        ({"chunk_bytes": 2**19}, "chunk: expected 1048576 bytes, found 524288"),
        ({"raid_disks": 9}, "members: expected 8, found 9"),
        ({"name": "data"}, "name: expected `nvme_raid0`, found `data`"),
    ],
)
def test_another_array_is_refused_by_name_of_the_difference(changes: dict[str, object], reason: str) -> None:
    superblocks = {name: replace(superblock, **changes) for name, superblock in SUPERBLOCKS.items()}  # type: ignore[arg-type]
    step = decide(WANTED, superblocks, [])
    assert (step.action, step.reasons) == ("refuse", (reason,))


def test_a_blank_drive_among_members_is_refused() -> None:
    superblocks = {name: superblock for name, superblock in SUPERBLOCKS.items() if name != "nvme3n1"}
    step = decide(WANTED, superblocks, [])
    assert step.action == "refuse"
    assert step.reasons[0].startswith("nvme3n1: no superblock")


def test_members_of_two_arrays_are_refused() -> None:
    superblocks = dict(SUPERBLOCKS, nvme3n1=replace(SUPERBLOCKS["nvme3n1"], uuid="0:0:0:0"))
    assert decide(WANTED, superblocks, []).action == "refuse"


def test_a_broken_array_is_refused() -> None:
    step = decide(WANTED, SUPERBLOCKS, [replace(ASSEMBLED, state="broken")])
    assert step.action == "refuse"
    assert "broken" in step.reasons[0]


@pytest.mark.parametrize(("state", "cure"), ARRAY_CURES.items())
def test_an_array_that_cannot_be_written_names_cause_and_cure(state: str, cure: str) -> None:
    array = replace(ASSEMBLED, state=state)
    step = decide(WANTED, SUPERBLOCKS, [array])
    assert step.action == "refuse"
    assert step.reasons == (array.fault,)
    assert f"array `md127` is {state}: " in step.reasons[0]
    assert cure in step.reasons[0]
    assert "\n" not in step.reasons[0]
    # One that only refuses writes answers reads.
    assert array.serves == (state == "readonly")


@pytest.mark.parametrize("state", ["active", "clean", "write-pending", "active-idle", "read-auto"])
def test_an_array_that_works_has_no_fault(state: str) -> None:
    assert replace(ASSEMBLED, state=state).fault is None
    assert replace(ASSEMBLED, state=state).serves
    lost = replace(ASSEMBLED, state=state, members=(*NAMES[:-1], None))
    assert "has lost a member" in str(lost.fault)


DRIVES = tuple(nvme_drive(number) for number in range(1, 9))
FACTS = Facts(WANTED, DRIVES, (), SUPERBLOCKS, [ASSEMBLED], {})
LOST = {name: block for name, block in SUPERBLOCKS.items() if name != NAMES[0]}


def test_members_that_a_plan_gives_up_count_as_blank() -> None:
    doomed = replace(FACTS, doomed=DRIVES, arrays=[])
    assert [decide_build(facts)[0].action for facts in (FACTS, doomed)] == ["keep", "create"]
    assert doomed.spared == []
    assert replace(FACTS, doomed=DRIVES[:2]).spared == list(DRIVES[2:])


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (replace(FACTS, superblocks=LOST), "no superblock, while the others have one. hint: nothing was changed; "),
        (replace(FACTS, doomed=DRIVES[:1]), "nvme1n1: no superblock, while"),
        (
            replace(FACTS, wanted=replace(WANTED, name="x")),
            "with `raid_array_adopt: true` under its own name. `ansible",
        ),
    ],
)
def test_an_array_that_is_not_as_asked_says_what_to_do(facts: Facts, words: str) -> None:
    with pytest.raises(ArrayRefusal, match=r"array `.*` is not as asked: ") as caught:
        decide_build(facts)
    assert words in str(caught.value)


def test_a_built_array_that_is_refused_is_drift_by_name() -> None:
    with pytest.raises(Drifted, match=r"`array`: expected as asked, found .*hint: look at `mdadm --examine`"):
        decide_build(replace(FACTS, superblocks=LOST, differences=()))
    left = Difference("array.chunk", "1MiB", "512KiB", mended=False)
    with pytest.raises(Drifted, match=r"array\.chunk"):
        decide_build(replace(FACTS, differences=(left,)))
    mended = [Difference("mdadm.conf", "a", "b")]
    assert decide_build(replace(FACTS, differences=mended))[1] == mended
    assert decide_build(replace(FACTS, superblocks={}, arrays=[], differences=(left,)))[0].action == "create"


def test_what_a_level_means_stands_in_its_row() -> None:
    assert RAID0.create_arguments(2**20) == ["--level=raid0", "--chunk=1024K"]
    assert replace(RAID0, chunked=False).create_arguments(2**20) == ["--level=raid0"]
    assert [replace(RAID0, chunked=chunked).chunk(2**20) for chunked in (True, False)] == [2**20, 0]
    assert (data_members("raid0", 8), data_members("somebody's", 8)) == (8, 8)
    assert [copies(level) for level in ("raid0", "linear", "raid1", "raid10")] == [False, False, True, True]
    assert [needs_every_member(level) for level in ("raid0", "raid1")] == [True, False]
    assert RAID1.create_arguments(2**20) == ["--level=raid1", "--bitmap=internal"]
    assert RAID10.create_arguments(2**20) == ["--level=raid10", "--chunk=1024K", "--layout=n2", "--bitmap=internal"]
    assert [data_members(level, 8) for level in LEVELS] == [8, 1, 4]
    assert [level.fewest for level in LEVELS.values()] == [1, 2, 4]


@pytest.mark.parametrize("level", LEVELS)
def test_every_way_to_write_a_level_is_one_level(level: str) -> None:
    assert [canonical(text) for text in (level, level[4:])] == [level, level]
    assert {level, level[4:]} <= set(ACCEPTED)


@pytest.mark.parametrize(("members", "forced"), [(1, True), (2, False)])
def test_an_array_of_one_drive_is_forced(monkeypatch: pytest.MonkeyPatch, members: int, forced: bool) -> None:
    """mdadm takes one drive for a mistake unless it reads `--force` before the number."""
    asked: list[list[str]] = []
    monkeypatch.setattr(create, "run", asked.append)
    create.create("nvme_raid0_numa1", 2**20, [nvme_drive(number) for number in range(members)])
    (argv,) = asked
    before = argv[: argv.index(f"--raid-devices={members}")]
    assert ("--force" in before) == ("--force" in argv) == forced
    assert "--run" not in argv


@given(st.sampled_from([RAID0, RAID1, RAID10]), st.integers(1, 6), st.data())
def test_a_level_serves_while_each_byte_is_on_a_member(level: Level, half: int, data: st.DataObject) -> None:
    count = 2 * half
    present = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    where = {"raid0": [[n] for n in range(count)], "raid1": [[*range(count)]]}
    pairs = [[n, n + 1] for n in range(0, count, 2)]
    assert level.serves(present) == all(any(present[n] for n in ns) for ns in where.get(level.name, pairs))
    assert not level.serves([])


@pytest.mark.parametrize(
    ("level", "gone", "serves", "degraded"),
    [
        ("raid0", {2}, False, False),
        ("raid1", {0, 1, 2, 3, 4, 5, 6}, True, True),
        ("raid1", {0, 1, 2, 3, 4, 5, 6, 7}, False, False),
        ("raid10", set(), True, False),
        ("raid10", {1, 2, 4, 7}, True, True),
        ("raid10", {2, 3}, False, False),
    ],
)
def test_lost_members_are_judged_by_the_level(level: str, gone: set[int], serves: bool, degraded: bool) -> None:
    members = tuple(None if slot in gone else name for slot, name in enumerate(NAMES))
    array = replace(ASSEMBLED, level=level, members=members)
    assert (array.serves, array.degraded, array.lost_data) == (serves, degraded, not serves)
    assert (array.fault is None) == serves
    if not serves and level != "raid0":
        assert "has lost more members than a RAID10 can" in str(array.fault).replace("RAID1 ", "RAID10 ")


def test_a_member_that_is_being_filled_stands_in_for_none() -> None:
    array = replace(ASSEMBLED, level="raid10", rebuilding=(NAMES[3],))
    assert (array.serves, array.degraded, array.survives(NAMES[3])) == (True, True, True)
    assert not array.survives(NAMES[2])
    assert not replace(array, members=(*NAMES[:2], None, *NAMES[3:])).serves


@pytest.mark.parametrize(
    ("level", "layout", "ours"),
    [("raid10", 258, True), ("raid10", "near=2", True), ("raid10", 513, False), ("raid10", "far=2", False)],
)
def test_a_raid10_of_another_layout_is_somebody_elses(level: str, layout: int | str, ours: bool) -> None:
    assert (with_layout(level, layout) in LEVELS) == ours
    assert with_layout("raid0", layout) == "raid0"


def test_a_rebuild_is_read_with_its_share_and_time(tmp_path: Path) -> None:
    base = tmp_path / "sys/block/md127/md"
    files = {
        "level": "raid1",
        "raid_disks": "2",
        "array_state": "active",
        "sync_action": "recover",
        "sync_completed": "2400000 / 4800000",
        "sync_speed": "10000",
    }
    for slot, (name, state) in enumerate((("nvme1n1", "in_sync"), ("nvme2n1", "spare"))):
        (base / f"dev-{name}/block").mkdir(parents=True)
        (base / f"dev-{name}/state").write_text(state + "\n")
        (base / f"rd{slot}").symlink_to(f"dev-{name}")
    for name, text in files.items():
        (base / name).write_text(text + "\n")
    (array,) = read_arrays(str(tmp_path))
    assert (array.members, array.rebuilding, array.degraded) == (("nvme1n1", "nvme2n1"), ("nvme2n1",), True)
    assert str(array.sync) == "50.0 %, about 2 min left"
    (base / "dev-nvme2n1/state").write_text("faulty,blocked\n")
    assert read_arrays(str(tmp_path))[0].members == ("nvme1n1", None)


def test_a_second_array_of_our_name_is_refused() -> None:
    step = decide(WANTED, {}, [replace(ASSEMBLED, members=("sda", "sdb"))])
    assert step.action == "refuse"


EMPTIED = replace(ASSEMBLED, members=(None,) * 8)
BUILT = {"array": {"uuid": UUID, "name": "nvme_raid0_numa0", "members": [{"serial": name} for name in NAMES]}}
OF_NUMA = Asked("nvme_raid0_numa0", "raid0", 2**20, NAMES, 8, volume="numa0")


@pytest.mark.parametrize("state", ["clean", "broken"])
def test_an_array_without_any_drive_says_how_to_let_it_go(state: str) -> None:
    """It keeps its name and its UUID, and takes none of the drives that come back."""
    emptied = replace(EMPTIED, state=state)
    let_go = "let its name go: `mdadm --stop /dev/md127`"
    assert not emptied.serves
    assert let_go in str(emptied.fault)
    for blocks in ({}, SUPERBLOCKS):
        with pytest.raises(ArrayRefusal, match="has none of its drives any more") as caught:
            decide_build(replace(FACTS, superblocks=blocks, arrays=[emptied]))
        assert let_go in str(caught.value)
    (state_of_it,) = [
        each
        for each in compare_array(BUILT, OF_NUMA, replace(emptied, name=OF_NUMA.name), {})
        if each.name == "array.state"
    ]
    assert let_go in state_of_it.hint
    # Drives of one that never ran are in no slot, and are there.
    assert not replace(EMPTIED, state="inactive").empty


def test_an_array_that_udev_knows_no_more_is_known_by_the_map(tmp_path: Path) -> None:
    """Its drives were pulled while a process held the volume: udev's links went with them, also that in /dev/md."""
    base = tmp_path / "sys/block/md127/md"
    base.mkdir(parents=True)
    for name, value in {"raid_disks": "2", "level": "raid0", "chunk_size": "1048576", "array_state": "broken"}.items():
        (base / name).write_text(value + "\n")
    for slot in (0, 1):
        (base / f"dev-nvme{slot}n1").mkdir()
        (base / f"dev-nvme{slot}n1/block").symlink_to("../gone")
        (base / f"rd{slot}").symlink_to(f"dev-nvme{slot}n1")
    (tmp_path / "run/mdadm").mkdir(parents=True)
    mapped = "md126 1.2 4c16e5ef:60436415:39939cbe:df3749f6 /dev/md/nvme_raid0_numa1\n"
    mapped += "md127 1.2 400b1e2d /dev/md/else\n"
    mapped += "md127 1.2 400b1e2d:14659b12:430f54c5:a1c36b06 /dev/md/nvme_raid0\n"
    (tmp_path / "run/mdadm/map").write_text(mapped)
    (array,) = read_arrays(str(tmp_path))
    assert (array.empty, array.name, array.uuid) == (True, "nvme_raid0", UUID)
    assert not array.was("1:1:1:1")
    # Also where the drives are back.
    for blocks in ({}, SUPERBLOCKS):
        assert "mdadm --stop /dev/md127" in " ".join(decide(WANTED, blocks, [array]).reasons)
    built = built_array(BUILT, [replace(array, name="nvme_raid0_numa0")], SUPERBLOCKS, {})
    assert built is not None
    assert (built.device, built.uuid) == ("md127", UUID)


@pytest.mark.parametrize(
    ("found", "hint"),
    [
        ("scratch_numa0", "`raid_array_name: scratch` asks for what is there"),
        ("data", "`mdadm --assemble /dev/md/nvme_raid0_numa0 --update=name --name=nvme_raid0_numa0` with its drives"),
    ],
)
def test_one_of_several_arrays_is_never_told_to_be_adopted(found: str, hint: str) -> None:
    blocks = {name: replace(block, name=found) for name, block in SUPERBLOCKS.items()}
    wanted = replace(WANTED, name=OF_NUMA.name)
    with pytest.raises(ArrayRefusal) as caught:
        decide_build(replace(FACTS, wanted=wanted, superblocks=blocks, volume="numa0"))
    serials = {name: name for name in NAMES}
    remade = compare_array(BUILT, OF_NUMA, replace(ASSEMBLED, uuid="1:1:1:1", name=found), serials)
    hints = {each.name: each.hint for each in remade}
    assert hint in str(caught.value)
    assert hint in hints["array.name"]
    assert f"--update=uuid --uuid={UUID}` with its drives" in hints["array.uuid"]
    assert "adopt" not in " ".join([str(caught.value), *hints.values()])


@given(st.sets(st.sampled_from(NAMES)), st.booleans())
def test_nothing_is_created_over_a_superblock(present: set[str], assembled: bool) -> None:
    superblocks = {name: SUPERBLOCKS[name] for name in present}
    step = decide(WANTED, superblocks, [ASSEMBLED] if assembled else [])
    assert (step.action == "create") == (not present and not assembled)


EXAMINE = """/dev/nvme1n1:
          Magic : a92b4efc
        Version : 1.2
    Feature Map : 0x0
     Array UUID : 2d1e0b40:129b6514:c5540f43:066bc3a1
           Name : node1:nvme_raid0  (local to host node1)
  Creation Time : Sat Nov 21 09:12:01 2026
     Raid Level : raid0
   Raid Devices : 8

 Avail Dev Size : 8382464 sectors (4.00 GiB 4.29 GB)
    Data Offset : 6144 sectors
   Super Offset : 8 sectors
   Unused Space : before=6064 sectors, after=0 sectors
          State : clean
    Device UUID : 39e1a7a1:2b1b3a1f:9c8d3f0e:4a1e0b7c

    Update Time : Sat Nov 21 09:12:01 2026
  Bad Block Log : 512 entries available at offset 8 sectors
       Checksum : 9d3d0d19 - correct
         Events : 0

     Chunk Size : 1024K

   Device Role : Active device 3
   Array State : AAAAAAAA ('A' == active, '.' == missing, 'R' == replacing)
/dev/nvme2n1:
   MBR Magic : aa55
Partition[0] :      8386560 sectors at         2048 (type 83)
"""


def test_examine_is_read_and_a_partition_table_is_no_superblock() -> None:
    assert parse_examine(EXAMINE) == {
        "nvme1n1": Superblock(
            *("nvme1n1", UUID, "nvme_raid0", "raid0", 8, 2**20, 3),
            created="Sat Nov 21 09:12:01 2026",
            data_offset_bytes=3 * 2**20,
        ),
    }


LINE = f"ARRAY /dev/md/nvme_raid0 metadata=1.2 UUID={UUID}"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", LINE + "\n"),
        ("MAILADDR root\n", f"MAILADDR root\n{LINE}\n"),
        (f"HOMEHOST <system>\n{LINE}\nMAILADDR root\n", f"HOMEHOST <system>\n{LINE}\nMAILADDR root\n"),
        (f"ARRAY /dev/md/nvme_raid0 UUID=0:0:0:0\nARRAY /dev/md127 UUID={UUID}\n", LINE + "\n"),
        ("ARRAY /dev/md/root UUID=1:1:1:1\n", f"ARRAY /dev/md/root UUID=1:1:1:1\n{LINE}\n"),
        ("# ARRAY /dev/md/nvme_raid0\n", f"# ARRAY /dev/md/nvme_raid0\n{LINE}\n"),
    ],
)
def test_mdadm_conf_gets_one_line(before: str, after: str) -> None:
    assert conf_with_array(before, "nvme_raid0", UUID) == after


@given(st.lists(st.sampled_from(["MAILADDR root", "", "# x", "ARRAY /dev/md/other UUID=1:1:1:1", LINE])))
def test_mdadm_conf_settles_at_once_and_keeps_foreign_lines(lines: list[str]) -> None:
    before = "".join(line + "\n" for line in lines)
    once = conf_with_array(before, "nvme_raid0", UUID)
    assert conf_with_array(once, "nvme_raid0", UUID) == once
    assert [line for line in once.splitlines() if line != LINE] == [line for line in lines if line != LINE]
