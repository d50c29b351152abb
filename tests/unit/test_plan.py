"""Plans: which drives can be wiped and which never, adopting, and the plan file."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import nvme_drive
from calls import call
from tunetool.node.array.adopt_or_wipe import Consent, Foreign, array_mates, is_foreign
from tunetool.node.array.drive_decisions import ADOPT, IGNORE, KEEP, REFUSE, TAKE, WIPE, Criteria, wipeable
from tunetool.node.array.drive_selection import ADOPT_HINT, Selection, select
from tunetool.node.array.md_arrays import Superblock, Wanted, adopted, decide
from tunetool.node.machine.drive_contents import Signature, UnreadableDevice, ends_digest
from tunetool.node.machine.drives import Drive, disks_under, read_drives
from tunetool.node.plan.plan_file import PlanError, document, dump, host_part, load, parse, seal, wipes

CRITERIA = Criteria(count=4)
NAME = "nvme_raid0"
UUID = "2d1e0b40-129b-6514-aaaa-000000000000"
BARE = UUID.replace("-", "")
CHUNK = 2**20
LABEL = Signature("nvme1n1", "ext4", None, "11", "0x438")


FOUR = [nvme_drive(number) for number in range(1, 5)]


def digest(text: str) -> str:
    return (text.encode().hex() * 64)[:64]


HASHES = {each.name: digest(each.serial) for each in FOUR}


def pick(
    drives: list[Drive], holding: dict[str, list[Signature]], consent: Consent | None = None, count: int = 4
) -> Selection:
    return select(drives, holding, replace(CRITERIA, count=count), NAME, None, consent)


def verdicts(selection: Selection) -> dict[str, str]:
    return {row.drive.serial: row.verdict for row in selection.decisions}


PLAN = Consent(plan=True, hashes=HASHES)


def test_a_plan_proposes_what_a_run_without_it_refuses() -> None:
    holding = {"nvme1n1": [LABEL]}
    assert verdicts(pick(FOUR, holding, PLAN)) == {"S1": WIPE, "S2": TAKE, "S3": TAKE, "S4": TAKE}
    plain = pick(FOUR, holding)
    assert plain.problem == "4 drives asked for, 3 usable"
    assert "`tunetool provision --plan plan.json`, read it" in str(plain.hint)
    assert wipeable(plain.decisions) == []


MIRROR = Foreign(BARE, NAME, "raid1", 0, 4)


def test_a_mirror_with_our_arrays_name_is_not_ours() -> None:
    holding = {each.name: [Signature(each.name, "linux_raid_member", f"node1:{NAME}", UUID)] for each in FOUR}
    assert set(verdicts(pick(FOUR, holding)).values()) == {KEEP}
    foreign = Consent(foreign=(MIRROR,), hashes=HASHES)
    selection = pick(FOUR, holding, foreign)
    assert set(verdicts(selection).values()) == {REFUSE}
    assert f"holds linux_raid_member label `node1:{NAME}` UUID {UUID}" in selection.decisions[0].reason
    # The owner may give it up, as anything else.
    assert set(verdicts(pick(FOUR, holding, replace(foreign, plan=True))).values()) == {WIPE}
    # While it runs, its members are in use.
    busy = [
        replace(each, uses=("member of `md5`", "mounted at `/srv` (through md5)"), arrays=("md5",)) for each in FOUR
    ]
    assert {row.reason for row in pick(busy, holding, foreign).decisions} == {"; ".join(busy[0].uses)}


@pytest.mark.parametrize(
    ("changes", "built", "foreign"),
    [
        ({}, None, False),
        ({"level": "raid5"}, None, True),
        ({"level": "raid0"}, None, False),
        ({"level": ""}, None, False),
        ({"level": "raid0", "name": "old"}, None, True),
        # Somebody made another level of our own UUID: that is drift, and reported as that.
        ({"level": "raid5"}, UUID, False),
        ({"level": "raid5"}, "other", True),
    ],
)
def test_an_array_is_told_apart_by_its_uuid_and_level(
    changes: dict[str, str], built: str | None, foreign: bool
) -> None:
    assert is_foreign(replace(MIRROR, **changes), NAME, built) is foreign


def test_blank_drives_come_first() -> None:
    selection = pick(FOUR, {"nvme1n1": [LABEL]}, PLAN, count=3)
    assert verdicts(selection) == {"S1": REFUSE, "S2": TAKE, "S3": TAKE, "S4": TAKE}
    assert selection.problem is None


def test_a_plan_never_guesses_among_several() -> None:
    holding = {"nvme1n1": [LABEL], "nvme2n1": [replace(LABEL, device="nvme2n1")]}
    selection = pick(FOUR, holding, PLAN, count=3)
    assert wipeable(selection.decisions) == []
    assert "nvme_drives_serials" in str(selection.hint)


@pytest.mark.parametrize(
    ("wanted", "verdict", "word"),
    [
        ({"S1": HASHES["nvme1n1"]}, WIPE, "holds ext4"),
        ({"S1": digest("other")}, REFUSE, "changed since"),
        ({"S2": HASHES["nvme2n1"]}, REFUSE, "holds ext4"),
    ],
    ids=["named", "stale", "foreign"],
)
def test_an_applied_plan_allows_exactly_what_it_names(wanted: dict[str, str], verdict: str, word: str) -> None:
    selection = pick(FOUR, {"nvme1n1": [LABEL]}, Consent(wipes=wanted, hashes=HASHES))
    row = selection.decisions[0]
    assert row.verdict == verdict
    assert word in row.reason
    assert (selection.problem is None) == (verdict == WIPE)
    if selection.problem:
        assert "new one" in str(selection.hint)


def idle(number: int) -> Drive:
    return nvme_drive(number, uses=("member of `md127`",), arrays=("md127",), idle_arrays=("md127",))


def raid(number: int, name: str = "node1:data") -> Signature:
    return Signature(f"nvme{number}n1", "linux_raid_member", name, UUID, "0x1000")


def test_an_idle_array_is_wiped_whole_or_not_at_all() -> None:
    drives = [idle(1), idle(2), *FOUR[2:]]
    holding = {"nvme1n1": [raid(1)], "nvme2n1": [raid(2)]}
    whole = replace(PLAN, disks_under={"md127": frozenset({"nvme1n1", "nvme2n1"})})
    assert [each.serial for each in wipeable(pick(drives, holding, whole).decisions)] == ["S1", "S2"]
    shared = replace(PLAN, disks_under={"md127": frozenset({"nvme1n1", "nvme2n1", "nvme9n1"})})
    selection = pick(drives, holding, shared)
    assert wipeable(selection.decisions) == []
    assert "nvme9n1" in selection.decisions[0].reason


def test_an_unassembled_array_is_wiped_whole_or_not_at_all() -> None:
    """Two of its members are of a model that is not asked for, and stay."""
    drives = [*FOUR[:2], *(nvme_drive(number, model="Another") for number in (3, 4))]
    holding = {drive.name: [raid(number)] for number, drive in enumerate(drives, 1)}
    plan = replace(PLAN, mates=array_mates(holding))
    criteria = Criteria(count=2, model=drives[0].model)
    selection = select(drives, holding, criteria, NAME, consent=plan)
    assert wipeable(selection.decisions) == []
    assert "its array has other members that may not be wiped: `S3`, `S4`" in selection.decisions[0].reason
    whole = select(
        drives[:2], holding, criteria, NAME, consent=replace(PLAN, mates=array_mates(dict([*holding.items()][:2])))
    )
    assert [each.serial for each in wipeable(whole.decisions)] == ["S1", "S2"]


def test_a_changed_member_spares_its_whole_array() -> None:
    drives = [idle(1), idle(2)]
    holding = {"nvme1n1": [raid(1)], "nvme2n1": [raid(2)]}
    changed = Consent(
        wipes={"S1": "another", "S2": HASHES["nvme2n1"]},
        hashes=HASHES,
        disks_under={"md127": frozenset({"nvme1n1", "nvme2n1"})},
    )
    selection = pick(drives, holding, changed, count=1)
    assert wipeable(selection.decisions) == []
    assert "its contents changed since" in selection.decisions[0].reason
    assert "may not be wiped: `S1`" in selection.decisions[1].reason


def test_an_array_in_use_is_never_wiped() -> None:
    uses = ("member of `md127`", "mounted at `/data` (through md127)")
    drives = [nvme_drive(1, uses=uses, arrays=("md127",)), *FOUR[1:]]
    consent = Consent(wipes={"S1": HASHES["nvme1n1"]}, hashes=HASHES)
    for allowed in (PLAN, consent):
        assert verdicts(pick(drives, {"nvme1n1": [raid(1)]}, allowed))["S1"] == REFUSE


def test_our_array_with_a_stranger_is_not_mended_by_wiping() -> None:
    holding = {f"nvme{number}n1": [raid(number, f"n:{NAME}")] for number in (2, 3, 4)}
    holding["nvme1n1"] = [LABEL]
    assert wipeable(pick(FOUR, holding, PLAN).decisions) == []


def test_our_mounted_array_with_another_label_is_in_use() -> None:
    uses = ("member of `md127`", "mounted at `/mnt` (through md127)")
    drives = [nvme_drive(number, uses=uses, arrays=("md127",)) for number in range(1, 5)]
    holding = {f"nvme{number}n1": [raid(number, f"n:{NAME}"), LABEL] for number in range(1, 5)}
    allow = Consent(wipes={each.serial: HASHES[each.name] for each in drives}, hashes=HASHES)
    assert set(verdicts(pick(drives, holding, allow)).values()) == {REFUSE}


SITUATIONS = st.sampled_from(["blank", "holds", "partitions", "mounted", "swap", "lvm", "idle", "no serial", "unread"])


@given(
    situations=st.lists(SITUATIONS, min_size=1, max_size=8),
    named=st.sets(st.integers(0, 7)),
    stale=st.sets(st.integers(0, 7)),
    plan=st.booleans(),
    adopt=st.booleans(),
    count=st.integers(1, 8),
    members=st.sets(st.integers(0, 9)),
)
def test_nothing_in_use_and_nothing_unnamed_is_ever_wiped(
    situations: list[str],
    named: set[int],
    stale: set[int],
    plan: bool,
    adopt: bool,
    count: int,
    members: set[int],
) -> None:
    drives, holding, unreadable = [], {}, {}
    for number, situation in enumerate(situations):
        candidate = nvme_drive(number)
        holding[candidate.name] = [] if situation == "blank" else [replace(LABEL, device=candidate.name)]
        if situation == "idle":
            candidate = idle(number)
            holding[candidate.name] = [raid(number)]
        elif situation == "partitions":
            candidate = replace(candidate, partitions=(candidate.name + "p1",))
        elif situation == "no serial":
            candidate = replace(candidate, serial="")
        elif situation in ("mounted", "swap", "lvm"):
            use = {"mounted": "mounted at `/x`", "swap": "active swap", "lvm": "member of `dm-0`"}[situation]
            candidate = replace(candidate, uses=(use,))
        elif situation == "unread":
            unreadable[candidate.name] = "cannot be read"
        drives.append(candidate)
    hashes = {candidate.name: digest(candidate.name) for candidate in drives}
    allowed = {f"S{number}": digest(f"nvme{number}n1" if number not in stale else "x") for number in named}
    consent = Consent(
        plan=plan,
        wipes={} if plan else allowed,
        hashes=hashes,
        adopt=adopt,
        chunk_bytes=CHUNK,
        foreign=(Foreign(BARE, "data", "raid0", CHUNK, count),),
        disks_under={"md127": frozenset(f"nvme{number}n1" for number in members)},
    )
    selection = select(drives, holding, Criteria(count=count), NAME, unreadable, consent)
    doomed = wipeable(selection.decisions)
    for candidate in doomed:
        assert not candidate.claims
        assert candidate.serial
        assert candidate.name not in unreadable
        assert plan or allowed.get(candidate.serial) == hashes[candidate.name]
        if candidate.idle_arrays:
            assert {f"nvme{number}n1" for number in members} <= {other.name for other in doomed}
    if selection.problem:
        assert not doomed
    else:
        assert len(selection.selected) == count


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two drives, the second with a partition, under one md device."""
    block, by_name = tmp_path / "sys/block", tmp_path / "sys/class/block"
    by_name.mkdir(parents=True)
    for name, folder in (("nvme1n1", ""), ("nvme2n1", ""), ("nvme2n1p1", "nvme2n1/"), ("md127", "")):
        (block / folder / name / "holders").mkdir(parents=True)
        (by_name / name).symlink_to(f"../../block/{folder}{name}")
    (block / "nvme2n1/nvme2n1p1/partition").write_text("1")
    (block / "md127/dev").write_text("9:127")
    (block / "md127/slaves").mkdir()
    for name in ("nvme1n1", "nvme2n1p1"):
        (block / "md127/slaves" / name).mkdir()
        (by_name / name / "holders/md127").mkdir()
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def test_an_idle_array_is_seen_from_below_and_above(machine: Path) -> None:
    first, second = read_drives(str(machine))
    assert (first.uses, first.claims, first.idle_arrays) == (("member of `md127`",), (), ("md127",))
    assert (second.claims, second.idle_arrays) == ((), ("md127",))
    assert disks_under(str(machine), "md127") == {"nvme1n1", "nvme2n1"}
    # As the kernel leaves it when a drive is pulled out of an array.
    (machine / "sys/block/md127/slaves/nvme3n1").symlink_to("../../../devices/gone/nvme3n1")
    assert disks_under(str(machine), "md127") == {"nvme1n1", "nvme2n1"}


@pytest.mark.parametrize("use", ["mount", "swap", "holder", "partition"])
def test_an_array_that_carries_anything_is_not_idle(machine: Path, use: str) -> None:
    if use == "mount":
        (machine / "proc/self/mountinfo").write_text("36 1 9:127 / /data rw - ext4 /dev/md127 rw\n")
    elif use == "swap":
        (machine / "proc/swaps").write_text("Filename Type Size Used Priority\n/dev/md127 partition 1 0 -2\n")
    elif use == "holder":
        (machine / "sys/block/md127/holders/dm-0").mkdir()
    else:
        part = machine / "sys/block/md127/md127p1"
        (part / "holders/dm-0").mkdir(parents=True)
        (part / "partition").write_text("1")
        (machine / "sys/class/block/md127p1").symlink_to("../../block/md127/md127p1")
    for each in read_drives(str(machine)):
        assert each.idle_arrays == ()
        assert each.claims


# --- adopting ---

MOUNTED = [
    nvme_drive(number, uses=("member of `md127`", "mounted at `/raid` (through md127)"), arrays=("md127",))
    for number in range(1, 5)
]
MEMBERS = {f"nvme{number}n1": [raid(number)] for number in range(1, 5)}
FITS = Foreign(BARE, "data", "raid0", CHUNK, 4)


def test_a_fitting_array_is_adopted_only_when_asked() -> None:
    consent = Consent(adopt=True, chunk_bytes=CHUNK, foreign=(FITS,))
    selection = pick([*MOUNTED, nvme_drive(5)], MEMBERS, consent)
    assert [each.serial for each in selection.selected] == ["S1", "S2", "S3", "S4"]
    assert verdicts(selection)["S1"] == ADOPT
    assert verdicts(selection)["S5"] == IGNORE
    refused = pick(MOUNTED, MEMBERS, replace(consent, adopt=False))
    assert (refused.selected, refused.hint) == ((), ADOPT_HINT)
    planned = pick(MOUNTED, MEMBERS, replace(consent, adopt=False, plan=True))
    assert "raid_array_adopt" in planned.decisions[0].reason


@pytest.mark.parametrize(
    "changes",
    [{"chunk_bytes": 2**19}, {"level": "raid1"}, {"raid_disks": 5}, {"version": "1.0"}, {"name": ""}],
    ids=str,
)
def test_an_array_that_differs_is_not_adopted(changes: dict[str, object]) -> None:
    foreign = replace(FITS, **changes)  # type: ignore[arg-type]
    selection = pick(MOUNTED, MEMBERS, Consent(adopt=True, chunk_bytes=CHUNK, foreign=(foreign,)))
    assert set(verdicts(selection).values()) == {REFUSE}


def test_an_adopted_array_may_differ_in_its_name_alone() -> None:
    wanted = Wanted(NAME, "raid0", CHUNK, ("a", "b"))
    blocks = {name: Superblock(name, UUID, "data", "raid0", 2, CHUNK, 0) for name in ("a", "b")}
    assert decide(wanted, blocks, []).action == "refuse"
    assert adopted(wanted, blocks).name == "data"
    assert decide(adopted(wanted, blocks), blocks, []).action == "assemble"
    other = {name: replace(block, chunk_bytes=2**19) for name, block in blocks.items()}
    assert decide(adopted(wanted, other), other, []).action == "refuse"
    assert adopted(wanted, {"a": blocks["a"]}) == wanted


# --- the file ---


def a_plan() -> dict[str, object]:
    part = host_part(
        pick(FOUR, {"nvme1n1": [LABEL]}, PLAN), {"nvme1n1": ["ext4 UUID 11"]}, HASHES, "create", "RAID0 over 4 drives"
    )
    return document({"node1": part}, "0.1.0")


def test_a_plan_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(dump(a_plan()))
    plan = load(str(path))
    assert plan["schema"] == "tunetool.plan/1"
    assert wipes(plan, "node1") == [{"serial": "S1", "hash": HASHES["nvme1n1"]}]
    assert wipes(plan, "node2") == []


def test_a_host_that_is_refused_gives_nothing_up() -> None:
    part = host_part(pick(FOUR, {"nvme1n1": [LABEL]}, PLAN), {}, HASHES, "refuse", "why")
    assert wipes({"hosts": {"n": part}}, "n") == []


def test_a_plan_that_was_edited_is_refused_by_name() -> None:
    text = dump(a_plan()).replace('"S1"', '"S2"')
    with pytest.raises(PlanError, match=r"`p\.json` was edited .*: `tunetool provision --plan plan\.json`"):
        parse(text, "p.json")


def test_a_forged_entry_is_refused() -> None:
    plan = json.loads(dump(a_plan()))
    plan["hosts"]["node1"]["drives"][0]["hash"] = "none"
    plan["sha256"] = seal(plan)
    with pytest.raises(PlanError, match="node1"):
        parse(json.dumps(plan), "p.json")


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", '{"schema": "tunetool.plan/2"}', '{"schema": "tunetool.record/1"}']
)
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="is not a plan file"):
        parse(text, "p.json")


def test_a_plan_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        load(str(tmp_path / "gone.json"))


def test_the_ends_of_a_device_count_and_its_middle_does_not(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    path.write_bytes(bytes(4 * 2**20))
    blank = ends_digest(str(path))
    assert ends_digest(str(path)) == blank
    for offset, same in ((0, False), (2**20 - 1, False), (2 * 2**20, True), (3 * 2**20, False), (4 * 2**20 - 1, False)):
        data = bytearray(4 * 2**20)
        data[offset] = 1
        path.write_bytes(data)
        assert (ends_digest(str(path)) == blank) == same, offset
    path.write_bytes(b"short")
    ends_digest(str(path))
    with pytest.raises(UnreadableDevice):
        ends_digest(str(tmp_path / "gone"))


PLAY = """
- hosts: localhost
  gather_facts: false
  tasks:
    - name: Write
      tunetool.node.write_plan:
        path: {path}
      check_mode: "{{{{ item }}}}"
      loop: [true, false]
      ignore_errors: true
"""


def test_a_plan_does_not_replace_a_pipe_or_a_device(tmp_path: Path) -> None:
    """As root, `-e plan_file=/dev/null` made a file of it."""
    pytest.importorskip("ansible", reason="Ansible's control side needs Python 3.11")
    pipe, play = tmp_path / "pipe", tmp_path / "play.yml"
    os.mkfifo(pipe)
    play.write_text(PLAY.format(path=pipe))
    done = call(
        str(Path(sys.executable).parent / "ansible-playbook"),
        str(play),
        "-i",
        "localhost,",
        cwd=Path(__file__).parents[2],
        env={**os.environ, "ANSIBLE_NOCOLOR": "1"},
    )
    said = f"`{pipe}` cannot be written: it is not a regular file. hint: give another `plan_file`"
    for is_check in (True, False):
        answer = " ".join(done.stdout.partition(f"(item={is_check})")[2].partition("failed:")[0].split())
        assert said in answer, done.stdout + done.stderr
    assert pipe.is_fifo()
    assert sorted(tmp_path.iterdir()) == [pipe, play]
