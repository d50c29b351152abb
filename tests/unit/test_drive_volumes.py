"""A volume on each drive: which drives carry one, how it is called, what differs, and how one or all of them go."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_removal import consent, verdicts
from test_selection import CRITERIA, EIGHT, drive, verdict

from machines import lay_out_drives, wishes_for_several
from tunetool.node.array.adopt_or_wipe import Consent
from tunetool.node.array.drift import layout_difference
from tunetool.node.array.drive_decisions import IGNORE, KEEP, REFUSE, TAKE, WIPE, Criteria
from tunetool.node.array.drive_selection import select
from tunetool.node.array.drive_volumes import (
    DriveVolume,
    by_serial_of,
    known_volumes,
    left_alone,
    named,
    note,
    part_left_alone,
)
from tunetool.node.audit.values import value_problems
from tunetool.node.common.check_result import PASS, Check
from tunetool.node.common.commands import Result
from tunetool.node.common.drift import Ledger
from tunetool.node.common.io_settings import ARGUMENTS as TUNING
from tunetool.node.common.manifest import ManifestError, load
from tunetool.node.common.refusal import Refusal
from tunetool.node.machine import file_system
from tunetool.node.machine.drive_contents import Signature
from tunetool.node.machine.drives import read_drives
from tunetool.node.removal.decision import Machine, consent_problem
from tunetool.node.removal.drives import plan_several
from tunetool.node.removal.facts import describe
from tunetool.node.removal.replacement import Swap, plan_replacement
from tunetool.node.tuning.apply import TuningJob
from tunetool.node.volume import apply as volume_apply
from tunetool.node.volume import mount_point, several
from tunetool.node.volume.immutable_flag import Directory
from tunetool.node.volume.late_mount import changes, check_boot, files
from tunetool.node.volume.unit_dropins import apply

POINT = "/mnt/nvme_raid0"
SERIALS = [f"LAB1NV{number}" for number in range(1, 9)]
XFS_INFO = """meta-data=/dev/nvme1n1 isize=512 agcount=4, agsize=262144 blks
data     =                       bsize=4096   blocks=1048576, imaxpct=25
         =                       sunit=0      swidth=0 blks
log      =internal log           bsize=4096   blocks=16384, version=2
         =                       sectsz=512   sunit=1 blks, lazy-count=1
"""


def xfs(device: str, uuid: str) -> Signature:
    return Signature(device, "xfs", "drive0", uuid)


def test_names_go_by_the_order_of_the_drives_and_then_stay(tmp_path: Path) -> None:
    first = named(["A", "B", "C"], {})
    assert [(each.name, each.serial) for each in first] == [("drive0", "A"), ("drive1", "B"), ("drive2", "C")]
    assert len({each.uuid for each in first}) == 3
    known = {each.serial: each for each in first}
    assert named(["C", "A", "B"], known) == first
    swapped = named(["NEW", "A", "C"], known)
    assert [(each.name, each.serial) for each in swapped] == [("drive0", "A"), ("drive1", "NEW"), ("drive2", "C")]
    many = [each.name for each in named([str(number) for number in range(12)], {})]
    assert many == [f"drive{number}" for number in range(12)]


def test_read_ahead_is_of_each_drive_that_has_a_volume(tmp_path: Path) -> None:
    manifest = lay_out_drives(tmp_path)
    for path in tmp_path.glob("sys/devices/pci*/**/nvme*n1/queue"):
        (path / "read_ahead_kb").write_text("128\n")
    ledger = Ledger(manifest, acting=False)
    asked = {**dict.fromkeys(TUNING, ""), "read_ahead": "4MiB", "serials": [], "array_uuid": ""}
    TuningJob(asked, ledger, str(tmp_path)).all()
    (_udev, ahead) = ledger.differences
    assert (ahead.name, ahead.expected) == ("io_tuning.read_ahead", "4 MiB")
    assert ahead.found.startswith("128 KiB")
    (rules,) = [entry["after"] for entry in ledger.diff if entry["after_header"].endswith(".rules")]
    assert [serial for serial in SERIALS if f'ATTRS{{serial}}=="{serial}"' in rules] == SERIALS
    assert rules.count('read_ahead_kb}="4096"') == 8
    assert "MD_UUID" not in rules


def test_what_was_noted_is_known_until_a_manifest_is(tmp_path: Path) -> None:
    manifest = lay_out_drives(tmp_path)
    volumes = named(["A", "B"], {})
    assert known_volumes(str(tmp_path)) == {}
    note(volumes, str(tmp_path))
    assert known_volumes(str(tmp_path)) == {each.serial: each for each in volumes}
    path = tmp_path / "etc/tunetool/node.json"
    path.write_text("{ damaged")
    assert list(known_volumes(str(tmp_path))) == ["A", "B"]
    path.write_text(json.dumps(manifest))
    assert list(known_volumes(str(tmp_path))) == SERIALS
    path.unlink()
    note([], str(tmp_path))
    assert known_volumes(str(tmp_path)) == {}


@pytest.mark.parametrize("name", ["../../etc", "a/b", "..", "", "drive0\n", "Drive 0"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    manifest = lay_out_drives(tmp_path)
    manifest["volumes"][2]["name"] = name
    path = tmp_path / "etc/tunetool/node.json"
    path.write_text(json.dumps(manifest))
    with pytest.raises(ManifestError) as damaged:
        load(str(path))
    assert "manifest.volumes[2].name is `" in str(damaged.value)
    path.unlink()
    note([DriveVolume("drive0", "A", "1"), DriveVolume(name, "B", "2")], str(tmp_path))
    with pytest.raises(Refusal) as refused:
        known_volumes(str(tmp_path))
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"`{tmp_path}/etc/tunetool/drives.json` names a volume `")
    assert "hint:" in line


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ([xfs("nvme3n1", "mine")], (KEEP, "volume `drive2`")),
        ([xfs("nvme3n1", "other")], (REFUSE, "holds xfs label `drive0` UUID other")),
        ([xfs("nvme3n1p1", "mine")], (REFUSE, "holds xfs label `drive0` UUID mine (on nvme3n1p1)")),
        ([xfs("nvme3n1", "mine"), Signature("nvme3n1", "gpt", None, None)], (REFUSE, "holds gpt")),
        ([Signature("nvme3n1", "linux_raid_member", "", "mine")], (REFUSE, "holds linux_raid_member UUID mine")),
        ([], (TAKE, "blank")),
    ],
)
def test_a_drive_is_kept_by_the_uuid_of_its_file_system(there: list[Signature], expected: tuple[str, str]) -> None:
    consent = Consent(level="single", volumes={"S003": DriveVolume("drive2", "S003", "mine")})
    used = [replace(each, uses=("mounted at `/x`",)) if each.serial == "S003" and there else each for each in EIGHT]
    selection = select(used if expected[0] == KEEP else EIGHT, {"nvme3n1": there}, CRITERIA, "", None, consent)
    assert verdict(selection, "S003") == expected
    assert (selection.problem is None) == (expected[0] != REFUSE)


def test_volumes_need_drives_that_are_alike() -> None:
    drives = [*EIGHT[:7], drive(8, size_bytes=2 * EIGHT[0].size_bytes)]
    selection = select(drives, {}, Criteria(count=8), "", None, Consent(level="single"))
    assert selection.problem == "the drives are not alike: `S008`"
    assert (selection.hint or "").startswith("a volume on each drive needs equal members")


@pytest.mark.parametrize(
    ("role", "values", "words"),
    [
        ("ephemeral", {"enabled": True}, "`ephemeral_enabled` and `raid_array_groups: drive`"),
        ("job_scratch", {"enabled": True}, "`job_scratch_enabled` and `raid_array_groups: drive`"),
        ("raid_array", {"adopt": True}, "several volumes are not adopted"),
        ("raid_array", {"level": "10"}, "`raid_array_level` and `raid_array_groups: drive`"),
    ],
)
def test_what_is_for_one_volume_alone_is_refused(role: str, values: dict[str, Any], words: str) -> None:
    roles: dict[str, dict[str, Any]] = {"raid_array": {"groups": "drive"}}
    roles.setdefault(role, {}).update(values)
    (problem,) = [each for each in value_problems(roles) if words in each]
    assert "hint: leave out one" in problem
    roles["raid_array"]["groups"] = "all"
    assert not any(words in each for each in value_problems(roles))


def test_a_node_built_otherwise_is_sent_to_its_teardown(tmp_path: Path) -> None:
    manifest = lay_out_drives(tmp_path)
    assert layout_difference(manifest, "drive") is None
    difference = layout_difference(manifest, "all")
    assert difference is not None
    assert (difference.name, difference.expected, difference.found) == ("array.groups", "all", "drive")
    assert "tunetool.node.teardown" in difference.hint


@pytest.fixture
def node(tmp_path: Path) -> Machine:
    manifest = lay_out_drives(tmp_path)
    (tmp_path / "etc/tunetool/node.json").write_text(json.dumps(manifest))
    drives = read_drives(str(tmp_path))
    volumes = known_volumes(str(tmp_path))
    return Machine(
        drives=drives,
        signatures={
            each.name: [xfs(each.name, volumes[each.serial].uuid)] for each in drives if each.serial in volumes
        },
        superblocks={},
        arrays=[],
        under={},
        inside={},
        manifest=manifest,
        unreadable={},
        volumes=volumes,
    )


def test_a_teardown_takes_every_volume_that_its_plan_names(node: Machine) -> None:
    removal = plan_several(node, POINT)
    assert removal.problems == ()
    assert verdicts(removal) == {"LAB1SYS": IGNORE, **dict.fromkeys(SERIALS, WIPE)}
    assert [place.mount_point for place in removal.places] == [f"{POINT}/drive{number}" for number in range(8)]
    assert consent_problem(removal, {}, None) == "nothing is removed without a plan"
    wipes, volume = consent(removal)
    assert consent_problem(removal, wipes, volume) is None
    del wipes["LAB1NV3"]
    assert "does not name drive `LAB1NV3`" in str(consent_problem(removal, wipes, volume))


def test_a_drive_that_holds_something_else_is_not_torn_down(node: Machine) -> None:
    other = replace(node, signatures={**node.signatures, "nvme3n1": [xfs("nvme3n1", "theirs")]})
    removal = plan_several(other, POINT)
    assert verdicts(removal)["LAB1NV3"] == REFUSE
    assert "holds xfs label `drive0` UUID theirs, where volume `drive2` was built" in removal.problems[0]
    blank = replace(node, signatures={key: value for key, value in node.signatures.items() if key != "nvme3n1"})
    unused = [replace(each, uses=()) if each.name == "nvme3n1" else each for each in blank.drives]
    assert verdicts(plan_several(replace(blank, drives=unused), POINT))["LAB1NV3"] == IGNORE


@pytest.mark.parametrize("present", [True, False], ids=["a drive that fails", "a drive that is gone"])
def test_a_replacement_takes_the_volume_of_the_old_drive_alone(node: Machine, present: bool) -> None:
    old = next(each for each in node.drives if each.serial == "LAB1NV3")
    new = replace(old, name="nvme9n1", serial="NEW", uses=())
    drives = [*(each for each in node.drives if present or each is not old), new]
    removal = plan_replacement(
        replace(node, drives=drives), "nvme_raid0", POINT, Swap("LAB1NV3", "NEW", Criteria(8), {})
    )
    assert removal.problems == ()
    kept = dict.fromkeys((serial for serial in SERIALS if serial != "LAB1NV3"), IGNORE)
    assert verdicts(removal) == {"LAB1SYS": IGNORE, **kept, "NEW": TAKE, **({"LAB1NV3": WIPE} if present else {})}
    assert [place.name for place in removal.places] == ["drive2"]
    assert {each.serial: each.name for each in removal.noted}["NEW"] == "drive2"
    assert len(removal.noted) == 8
    assert {each.uuid for each in removal.noted} >= {node.volumes[serial].uuid for serial in kept}
    assert sorted(removal.serials) == sorted([*kept, "NEW"])


def test_a_replacement_that_was_cut_off_is_known_to_be_done(node: Machine) -> None:
    swap = Swap("LAB1NV3", "NEW", Criteria(8), {})
    noted = {("NEW" if serial == "LAB1NV3" else serial): each for serial, each in node.volumes.items()}
    removal = plan_replacement(replace(node, manifest=None, volumes=noted), "nvme_raid0", POINT, swap)
    assert removal.done
    assert "NEW" in removal.serials


def without(node: Machine, *lost: str, new: Sequence[str] = ()) -> Machine:
    """The node without the drives of these serials, and with blank ones that came."""
    like = node.drives[-1]
    came = [replace(like, name=f"nvme{20 + at}n1", serial=serial, uses=()) for at, serial in enumerate(new)]
    return replace(node, drives=[*(each for each in node.drives if each.serial not in lost), *came])


BROKEN = (
    "volume `drive4` is broken without `LAB1NV5`, and was left alone. hint: replace it next: `ansible-playbook "
    "tunetool.node.replace_drive -e replace_drive_old_serial=LAB1NV5 -e replace_drive_new_serial=NEW`"
)


def test_two_drives_of_two_volumes_are_replaced_in_turn(node: Machine, tmp_path: Path) -> None:
    assert node.manifest is not None
    there = without(node, "LAB1NV3", "LAB1NV5", new=["NEW"])
    swap = Swap("LAB1NV3", "NEW", Criteria(8), {})
    removal = plan_replacement(there, "nvme_raid0", POINT, swap)
    assert removal.problems == ()
    stay = [serial for serial in SERIALS if serial not in ("LAB1NV3", "LAB1NV5")]
    assert verdicts(removal) == {"LAB1SYS": IGNORE, **dict.fromkeys(stay, IGNORE), "NEW": TAKE}
    assert [place.name for place in removal.places] == ["drive2"]
    assert sorted(removal.serials) == sorted([*stay, "NEW"])
    assert BROKEN in describe(removal, []).splitlines()
    # What is known once the manifest is gone.
    note(removal.noted, str(tmp_path))
    (tmp_path / "etc/tunetool/node.json").unlink()
    noted = known_volumes(str(tmp_path))
    assert noted == by_serial_of(removal.noted)
    assert [each.as_built for each in left_alone(noted)] == [node.manifest["volumes"][4]]
    cut = replace(there, manifest=None, volumes=noted)
    again = plan_replacement(cut, "nvme_raid0", POINT, swap)
    assert again.done
    assert "LAB1NV5" not in again.serials
    # The second one, whether or not the first run came to its end.
    came = replace(there.drives[-1], name="nvme30n1", serial="LAST")
    second = Swap("LAB1NV5", "LAST", Criteria(8), {})
    last = plan_replacement(replace(cut, drives=[*there.drives, came]), "nvme_raid0", POINT, second)
    assert (last.problems, last.left) == ((), ())
    assert left_alone(by_serial_of(last.noted)) == []
    assert {each.name for each in last.noted} == {f"drive{number}" for number in range(8)}
    assert sorted(last.serials) == sorted([*stay, "NEW", "LAST"])


def test_a_dead_drive_that_answers_is_to_be_pulled(node: Machine) -> None:
    there = replace(without(node, "LAB1NV3", new=["NEW"]), unreadable={"nvme5n1": "cannot be read: Input/output error"})
    removal = plan_replacement(there, "nvme_raid0", POINT, Swap("LAB1NV3", "NEW", Criteria(8), {}))
    assert removal.problems == (
        "drive `LAB1NV5` of volume `drive4` cannot be read: Input/output error. hint: end what uses it; pull a "
        "dead one, and its volume is left alone",
    )


def test_a_drive_beside_without_its_volume_refuses(node: Machine) -> None:
    """The build, which comes after the removal, would refuse what lies there, or make its volume again, empty."""
    there, swap = without(node, "LAB1NV3", new=["NEW"]), Swap("LAB1NV3", "NEW", Criteria(8), {})
    theirs = replace(there, signatures={**node.signatures, "nvme5n1": [xfs("nvme5n1", "theirs")]})
    assert plan_replacement(theirs, "nvme_raid0", POINT, swap).problems == (
        "drive `LAB1NV5` holds xfs label `drive0` UUID theirs, where volume `drive4` was built. hint: nothing was "
        "changed; pull it, and its volume is left alone",
    )
    blank = replace(there, signatures={name: each for name, each in node.signatures.items() if name != "nvme5n1"})
    (problem,) = plan_replacement(blank, "nvme_raid0", POINT, swap).problems
    assert problem.startswith("drive `LAB1NV5` holds nothing, where volume `drive4` was built.")
    # One that was noted, and is yet to be made.
    assert plan_replacement(replace(blank, manifest=None), "nvme_raid0", POINT, swap).problems == ()


def test_a_broken_volume_of_which_no_part_is_known_refuses(node: Machine) -> None:
    """Nothing could be written of it into the new manifest."""
    there = replace(without(node, "LAB1NV3", "LAB1NV5", new=["NEW"]), manifest=None)
    removal = plan_replacement(there, "nvme_raid0", POINT, Swap("LAB1NV3", "NEW", Criteria(8), {}))
    assert removal.problems[0].startswith("more members are absent: `LAB1NV5`. hint:")


def test_a_drive_that_is_back_is_no_longer_left_alone(node: Machine) -> None:
    assert node.manifest is not None
    noted = {
        serial: replace(each, as_built=node.manifest["volumes"][4] if serial == "LAB1NV5" else None)
        for serial, each in node.volumes.items()
    }
    there = replace(without(node, "LAB1NV3", new=["NEW"]), manifest=None, volumes=noted)
    removal = plan_replacement(there, "nvme_raid0", POINT, Swap("LAB1NV3", "NEW", Criteria(8), {}))
    assert (removal.problems, removal.left) == ((), ())
    assert "LAB1NV5" in removal.serials
    assert left_alone(by_serial_of(removal.noted)) == []


def test_a_note_of_another_form_makes_no_volume_known(tmp_path: Path) -> None:
    (tmp_path / "etc/tunetool").mkdir(parents=True)
    row = {"name": "drive0", "serial": "A", "uuid": "1"}
    path = tmp_path / "etc/tunetool/drives.json"
    path.write_text(json.dumps([row]))
    assert list(known_volumes(str(tmp_path))) == ["A"]
    path.write_text(json.dumps([{**row, "as_built": "drive0"}]))
    assert known_volumes(str(tmp_path)) == {}


@pytest.mark.parametrize(
    "lie",
    [{"array": {}}, {"filesystem": None}, {"offload_dir": 1}, {"name": "drive5"}, "another drive", "another UUID"],
    ids=str,
)
def test_a_note_that_lies_of_a_volume_left_alone_is_none(node: Machine, tmp_path: Path, lie: Any) -> None:
    """Nothing of it would be looked at, and the new manifest would have it."""
    assert node.manifest is not None
    part = json.loads(json.dumps(node.manifest["volumes"][4]))
    if lie == "another drive":
        part["array"]["members"][0]["serial"] = "LAB1NV6"
    elif lie == "another UUID":
        part["array"]["uuid"] = "1"
    else:
        part = {**part, **lie}
    (tmp_path / "etc/tunetool/node.json").unlink()
    note([replace(node.volumes["LAB1NV5"], as_built=part)], str(tmp_path))
    assert known_volumes(str(tmp_path)) == {}


def test_the_manifest_keeps_what_was_left_alone_and_says_it(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ansible", reason="Ansible's control side needs Python 3.11")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    module = importlib.import_module("plugins.modules.node_manifest")
    assert node.manifest is not None
    volumes = [dict(each) for each in node.manifest["volumes"]]
    volumes[4]["left"] = True
    assert module.storage_of({"volume": "", "volumes": volumes}) == {"volumes": node.manifest["volumes"]}
    checked: list[str] = []
    said: list[str] = []

    def run_checks(document: dict[str, Any]) -> list[Check]:
        checked.extend(each["name"] for each in document["volumes"])
        return [Check("array.members", PASS, "", "", "")]

    monkeypatch.setattr(module, "run_checks", run_checks)
    monkeypatch.setattr(module, "read_drives", lambda: without(node, "LAB1NV5").drives)
    params = {"volumes": volumes, "reboot_reasons": []}
    fake = SimpleNamespace(params=params, warn=said.append, exit_json=lambda **answer: None)
    module.judge(fake, dict(node.manifest, reboot_required=False), {})
    assert checked == [f"drive{number}" for number in range(8) if number != 4]
    assert said == [BROKEN]


def look(root: Path, manifest: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Ledger:
    """Compare the volumes of a recorded node with what built them."""
    volumes = known_volumes(str(root))
    by_name = {each.name: volumes.get(each.serial) for each in read_drives(str(root))}

    def signatures(names: Sequence[str]) -> list[Signature]:
        return [Signature(name, "xfs", each.name, each.uuid) for name in names if (each := by_name[name])]

    monkeypatch.setattr(volume_apply, "read_signatures", signatures)
    monkeypatch.setattr(file_system, "run", lambda *argv, **_: Result(0, XFS_INFO, ""))
    monkeypatch.setattr(mount_point, "look_beneath", lambda path: Directory(True, True))
    monkeypatch.setattr(several, "look", lambda path: Directory(True, True))
    wanted = {
        **wishes_for_several(manifest),
        "volumes": [{"name": each["name"], "array": each["array"]} for each in manifest["volumes"]],
        **changes,
    }
    ledger = Ledger(manifest, acting=False)
    several.Volumes(wanted, ledger, str(root)).all()
    return ledger


@pytest.fixture
def built(tmp_path: Path) -> dict[str, Any]:
    manifest = lay_out_drives(tmp_path)
    lines = []
    for each in manifest["volumes"]:
        filesystem = each["filesystem"]
        options = ",".join([*filesystem["mount_options"], "nofail", "x-systemd.device-timeout=30s"])
        lines.append(f"UUID={filesystem['uuid']} {filesystem['mount_point']} xfs {options} 0 0\n")
        (tmp_path / each["offload_dir"].lstrip("/")).chmod(0o1777)
        for change in changes(
            files(filesystem["mount_point"], filesystem["uuid"], each["name"]), str(tmp_path), each["name"]
        ):
            apply(change)
    (tmp_path / "etc/fstab").write_text("".join(lines))
    (tmp_path / "etc/tunetool/node.json").write_text(json.dumps(manifest))
    return manifest


def test_a_built_node_has_no_difference(tmp_path: Path, built: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [str(each) for each in look(tmp_path, built, monkeypatch).differences] == []
    for each in built["volumes"]:
        assert check_boot(each["filesystem"], str(tmp_path), each["name"]).status == "pass"


def test_a_difference_names_its_volume(tmp_path: Path, built: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fstab = tmp_path / "etc/fstab"
    fstab.write_text("".join(line for line in fstab.read_text().splitlines(keepends=True) if "/drive3 " not in line))
    ledger = look(tmp_path, built, monkeypatch, services=["slurmd.service"])
    names = [each.name for each in ledger.differences]
    assert names == ["services[slurmd.service][drive0]", f"fstab[{POINT}/drive3][drive3]"]
    drop_in = next(entry["after"] for entry in ledger.diff if "slurmd" in entry["after_header"])
    assert f"RequiresMountsFor={POINT}/drive0 {POINT}/drive1 " in drop_in


def test_a_volume_that_is_left_alone_is_not_looked_at(
    tmp_path: Path, built: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fstab = tmp_path / "etc/fstab"
    fstab.write_text("".join(line for line in fstab.read_text().splitlines(keepends=True) if "/drive3 " not in line))
    for path in (built["volumes"][3]["offload_dir"], built["volumes"][3]["filesystem"]["mount_point"]):
        (tmp_path / path.lstrip("/")).rmdir()
    broken = replace(known_volumes(str(tmp_path))["LAB1NV4"], as_built=built["volumes"][3])
    volumes = [{"name": each["name"], "array": each["array"]} for each in built["volumes"]]
    volumes[3] = part_left_alone(broken)
    ledger = look(tmp_path, built, monkeypatch, volumes=volumes)
    assert [str(each) for each in ledger.differences] == []
    assert ledger.diff == []


def test_nothing_else_lies_beside_the_volumes(
    tmp_path: Path, built: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / POINT.lstrip("/") / "results.csv").touch()
    (difference,) = look(tmp_path, built, monkeypatch).differences
    assert (difference.name, difference.mended) == ("mount.around", False)
    assert "`results.csv`" in difference.found
    (tmp_path / "etc/tunetool/node.json").unlink()
    note(list(known_volumes(str(tmp_path)).values()), str(tmp_path))
    wanted = {"mount_point": POINT, "volumes": [], "protect_mount_point": True}
    with pytest.raises(Refusal, match="beside the volumes"):
        several.Volumes(wanted, Ledger(None, acting=False), str(tmp_path)).around()
