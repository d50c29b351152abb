"""An array for each NUMA node: which drives are whose, what is kept, what differs, and how one or all of them go."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_removal import consent, verdicts
from test_selection import EIGHT, drive, verdict

from machines import lay_out_numa, wishes_for_several
from tunetool.health.results import of_checks
from tunetool.node.array import create
from tunetool.node.array.adopt_or_wipe import Consent
from tunetool.node.array.drift import Asked, layout_difference
from tunetool.node.array.drive_decisions import IGNORE, KEEP, REFUSE, TAKE, WIPE, Criteria, groups_problem
from tunetool.node.array.drive_selection import select
from tunetool.node.array.drive_volumes import (
    AnyVolume,
    ArrayVolume,
    DriveVolume,
    by_serial_of,
    groups_of,
    in_order,
    known_volumes,
    note,
    volumes_of,
)
from tunetool.node.array.md_arrays import Array, Superblock, read_arrays
from tunetool.node.array.numa_volumes import Grouped, found_volumes, grouped, moved
from tunetool.node.audit import before_changes
from tunetool.node.audit.manifest_checks import run_checks
from tunetool.node.audit.values import value_problems
from tunetool.node.common.commands import CommandError, Result
from tunetool.node.common.drift import Ledger
from tunetool.node.common.io_settings import ARGUMENTS as TUNING
from tunetool.node.common.manifest import validate
from tunetool.node.common.refusal import Refusal
from tunetool.node.machine import file_system
from tunetool.node.machine.drive_contents import Signature
from tunetool.node.machine.drives import Drive, disks_under, read_drives
from tunetool.node.machine.mounts import read_mounts
from tunetool.node.removal import apply as removal_apply
from tunetool.node.removal.decision import Machine, consent_problem
from tunetool.node.removal.drives import plan_several
from tunetool.node.removal.facts import describe
from tunetool.node.removal.replacement import Swap, plan_replacement
from tunetool.node.tuning.apply import TuningJob
from tunetool.node.volume import apply as volume_apply
from tunetool.node.volume import mount_point, several
from tunetool.node.volume.immutable_flag import Directory
from tunetool.node.volume.late_mount import changes, files
from tunetool.node.volume.unit_dropins import apply

NAME, POINT, CHUNK = "nvme_raid0", "/mnt/nvme_raid0", 2**20
UUIDS = ["00000000:a7b73bbf:d9e19d4e:8dcddec7", "00000001:a7b73bbf:d9e19d4e:8dcddec7"]
SERIALS = [f"LAB1NV{number}" for number in range(1, 9)]
MINE = [SERIALS[0::2], SERIALS[1::2]]
"""The recorded node's, by NUMA node."""
DRIVES = [replace(each, numa_node=number % 2) for number, each in enumerate(EIGHT)]
OF = [[each.serial for each in DRIVES if each.numa_node == node] for node in (0, 1)]
XFS_INFO = """meta-data=/dev/md127 isize=512 agcount=4, agsize=262144 blks
data     =                       bsize=4096   blocks=1048576, imaxpct=25
         =                       sunit=256    swidth=1024 blks
log      =internal log           bsize=4096   blocks=16384, version=2
         =                       sectsz=512   sunit=64 blks, lazy-count=1
"""


def volume(node: int, serials: Sequence[str], uuid: str = "") -> ArrayVolume:
    return ArrayVolume(f"numa{node}", tuple(serials), uuid or UUIDS[node], f"{NAME}_numa{node}", "raid0", CHUNK)


KNOWN = by_serial_of([volume(node, OF[node]) for node in (0, 1)])


def label(device: str, node: int, uuid: str = "") -> Signature:
    """As wipefs prints it, which groups a UUID in its own way."""
    digits = (uuid or UUIDS[node]).replace(":", "")
    grouped = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    return Signature(device, "linux_raid_member", f"node1:{NAME}_numa{node}", grouped)


def labels(*nodes: int) -> dict[str, list[Signature]]:
    return {each.name: [label(each.name, each.numa_node or 0)] for each in DRIVES if each.numa_node in nodes}


def of_nodes(drives: Sequence[Drive], known: dict[str, AnyVolume] | None = None, kept: Sequence[str] = ()) -> Grouped:
    return grouped(drives, known or {}, kept, NAME, CHUNK)


def block(device: str, role: int | None, node: int = 0, **changes: Any) -> Superblock:
    plain = Superblock(device, UUIDS[node], f"{NAME}_numa{node}", "raid0", 4, CHUNK, role, "1.2", "then", 2**20)
    return replace(plain, **changes)


def test_each_numa_node_has_an_array_of_its_drives() -> None:
    answer = of_nodes(DRIVES)
    assert answer.problems == ()
    assert [(each.name, each.array, list(each.serials)) for each in answer.volumes] == [
        ("numa0", "nvme_raid0_numa0", OF[0]),
        ("numa1", "nvme_raid0_numa1", OF[1]),
    ]
    assert len({each.uuid for each in answer.volumes}) == 2
    assert str(answer) == "drives of each volume: `numa0` 4, `numa1` 4"


def test_unequal_groups_and_a_single_one_are_said() -> None:
    assert str(of_nodes(DRIVES[:5])) == "drives of each volume, not the same number everywhere: `numa0` 3, `numa1` 2"
    alone = of_nodes([each for each in DRIVES if each.numa_node])
    assert [each.name for each in alone.volumes] == ["numa1"]
    assert str(alone) == "all drives are on one NUMA node, so there is one volume: `numa1` 4"


def test_a_drive_without_a_numa_node_is_refused() -> None:
    (problem,) = of_nodes([*DRIVES[:7], replace(DRIVES[7], numa_node=None)]).problems
    assert problem.startswith("`S008`: the firmware names no NUMA node")
    assert problem.endswith("hint: `raid_array_groups: all`")


def test_a_drive_in_another_slot_stays_in_its_array() -> None:
    """Each is on the other node by now, and one on none that is known."""
    away = [replace(each, numa_node=1 - (each.numa_node or 0)) for each in DRIVES]
    away[0] = replace(away[0], numa_node=None)
    for kept in (OF[0] + OF[1], OF[0], []):
        answer = of_nodes(away, KNOWN, kept)
        assert (answer.problems, [list(each.serials) for each in answer.volumes]) == ((), OF)
    first, second = moved(in_order(KNOWN), {each.serial: each.numa_node for each in away})
    assert (first.name, second.name, first.mended) == ("array.numa[numa0]", "array.numa[numa1]", False)
    assert first.found == "`S001` on an unknown one, `S003` on 1, `S005` on 1, `S007` on 1"
    assert moved(in_order(KNOWN), {each.serial: each.numa_node for each in DRIVES[1:]}) == []


def test_an_array_gets_no_drive_that_it_was_made_without() -> None:
    rest = [each for each in DRIVES if each.serial != "S003"]
    (gone,) = of_nodes(rest, KNOWN, OF[0]).problems
    assert gone.startswith("volume `numa0` also has `S003`, not chosen or not there. hint:")
    assert "`ansible-playbook tunetool.node.replace_drive`" in gone
    fewer = by_serial_of([volume(0, OF[0][:3])])
    (more,) = of_nodes(DRIVES, fewer, OF[0][:3]).problems
    assert more.startswith("volume `numa0` was made without `S007`, of the same NUMA node. hint:")
    # Nothing is on the drives of the one that was only begun: it is begun again as asked now.
    answer = of_nodes(rest, KNOWN, OF[1])
    assert [list(each.serials) for each in answer.volumes] == [["S001", "S005", "S007"], OF[1]]
    assert answer.volumes[0].uuid != UUIDS[0]


def test_what_was_noted_of_arrays_is_known_until_a_manifest_is(tmp_path: Path) -> None:
    manifest = lay_out_numa(tmp_path)
    note([volume(0, ["A", "B"]), volume(1, ["C"])], str(tmp_path))
    noted = known_volumes(str(tmp_path))
    assert noted == by_serial_of([volume(0, ["A", "B"]), volume(1, ["C"])])
    assert known_volumes(str(tmp_path), "drive") == {}
    (tmp_path / "etc/tunetool/node.json").write_text(json.dumps(manifest))
    assert known_volumes(str(tmp_path), "numa") == by_serial_of([volume(node, MINE[node]) for node in (0, 1)])
    assert groups_of(manifest) == "numa"
    difference = layout_difference(manifest, "drive")
    assert difference is not None
    assert (difference.expected, difference.found) == ("drive", "numa")


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ([label("nvme3n1", 0)], (KEEP, "volume `numa0`")),
        ([label("nvme3n1", 0, UUIDS[1])], REFUSE),
        ([label("nvme3n1p1", 0)], REFUSE),
        ([label("nvme3n1", 0), Signature("nvme3n1", "gpt", None, None)], REFUSE),
        ([], (TAKE, "blank")),
    ],
    ids=["its own", "another of the same name", "on a partition", "and more", "blank"],
)
def test_a_member_is_kept_by_the_uuid_of_its_array(there: list[Signature], expected: tuple[str, str] | str) -> None:
    drives = [
        replace(each, uses=("member of `md127`",)) if there and each.serial == "S003" else each for each in DRIVES
    ]
    selection = select(drives, {"nvme3n1": there}, Criteria(count=8), "", None, Consent(volumes=KNOWN))
    assert verdict(selection, "S003")[: 2 if isinstance(expected, tuple) else 1] == (
        expected if isinstance(expected, tuple) else (expected,)
    )
    assert (selection.problem is None) == (expected != REFUSE)


def test_a_cut_off_array_is_given_up_beside_one_that_stays() -> None:
    """And nothing else that holds something is, for the sake of a volume that was made."""
    written = {name: each for name, each in labels(0, 1).items() if name not in ("nvme6n1", "nvme8n1")}
    hashes = {each.name: each.serial for each in DRIVES}
    begun = {UUIDS[1].replace(":", ""): "making its array was cut off"}
    allow = Consent(plan=True, volumes=KNOWN, cut_off=begun, hashes=hashes)
    selection = select(DRIVES, written, Criteria(count=8), "", None, allow)
    assert selection.problem is None
    found = {serial: verdict(selection, serial)[0] for serial in OF[0] + OF[1]}
    assert found == {**dict.fromkeys(OF[0], KEEP), "S002": WIPE, "S004": WIPE, "S006": TAKE, "S008": TAKE}
    strange = {**labels(0), "nvme2n1": [Signature("nvme2n1", "ext4", None, "1")]}
    selection = select(DRIVES, strange, Criteria(count=8), "", None, allow)
    assert verdict(selection, "S002")[0] == REFUSE


def test_whole_arrays_are_found_by_their_names_alone() -> None:
    serials = {f"nvme{number}n1": f"S{number}" for number in range(9)}
    blocks = [block(f"nvme{number}n1", number) for number in range(4)]
    whole = {each.device: each for each in reversed(blocks)}
    assert found_volumes(whole, serials, NAME) == by_serial_of([volume(0, ["S0", "S1", "S2", "S3"])])
    for other in (
        {name: each for name, each in whole.items() if name != "nvme2n1"},
        {**whole, "nvme8n1": block("nvme8n1", 0, uuid="2:2:2:2", raid_disks=1)},
        {name: replace(each, name="data_numa0") for name, each in whole.items()},
        {name: replace(each, name=NAME) for name, each in whole.items()},
        {**whole, "nvme2n1": block("nvme2n1", None)},
    ):
        assert found_volumes(other, serials, NAME) == {}


@pytest.mark.parametrize(
    ("role", "values", "words"),
    [
        ("ephemeral", {"enabled": True}, "`ephemeral_enabled` and `raid_array_groups: numa`"),
        ("job_scratch", {"enabled": True}, "`job_scratch_enabled` and `raid_array_groups: numa`"),
        ("raid_array", {"adopt": True}, "several volumes are not adopted"),
        ("raid_array", {"level": "10"}, "`raid_array_groups: numa`: each array is a RAID0"),
        ("raid_array", {"name": "n" * 25}, "too long for `raid_array_groups: numa`"),
    ],
)
def test_what_arrays_of_numa_nodes_do_not_have_is_refused(role: str, values: dict[str, Any], words: str) -> None:
    roles: dict[str, dict[str, Any]] = {"raid_array": {"groups": "numa"}}
    roles.setdefault(role, {}).update(values)
    (problem,) = [each for each in value_problems(roles) if words in each]
    assert ". hint: " in problem
    assert groups_problem({"groups": "numa", "adopt": False, "level": "0", "name": "n" * 24}) is None


def test_the_notes_of_begun_arrays_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "etc/tunetool").mkdir(parents=True)
    create.note_formatting(UUIDS[0], str(tmp_path), "numa0")
    create.note_formatting("9:9:9:9", str(tmp_path))
    noted = create.begun(str(tmp_path), "numa0")
    assert noted is not None
    assert (noted.uuid, noted.formatting) == (UUIDS[0], True)
    assert create.begun(str(tmp_path), "numa1") is None


def test_read_ahead_is_of_each_array(tmp_path: Path) -> None:
    manifest = lay_out_numa(tmp_path)
    for device in ("md127", "md126"):
        (tmp_path / f"sys/devices/virtual/block/{device}/queue/read_ahead_kb").write_text("128\n")
    ahead = {**dict.fromkeys(TUNING, ""), "read_ahead": "4MiB", "array_uuid": ""}
    for asked in ({"serials": []}, {"serials": SERIALS, "volumes": manifest["volumes"]}):
        ledger = Ledger(manifest, acting=False)
        TuningJob({**ahead, **asked}, ledger, str(tmp_path)).all()
        (rules,) = [entry["after"] for entry in ledger.diff if entry["after_header"].endswith(".rules")]
        assert [uuid for uuid in UUIDS if f'MD_UUID}}=="{uuid}"' in rules] == UUIDS
        assert "serial" not in rules
        assert "128 KiB" in ledger.differences[1].found
    gone = json.loads(json.dumps(manifest["volumes"]).replace(UUIDS[1], "7:7:7:7"))
    with pytest.raises(Refusal, match="array 7:7:7:7 does not run"):
        TuningJob({**ahead, "serials": SERIALS, "volumes": gone}, Ledger(None, False), str(tmp_path)).all()


@pytest.fixture
def built(tmp_path: Path) -> dict[str, Any]:
    manifest = lay_out_numa(tmp_path)
    lines, conf = [], []
    for each in manifest["volumes"]:
        filesystem = each["filesystem"]
        options = ",".join([*filesystem["mount_options"], "nofail", "x-systemd.device-timeout=30s"])
        lines.append(f"UUID={filesystem['uuid']} {filesystem['mount_point']} xfs {options} 0 0\n")
        conf.append(f"ARRAY /dev/md/{each['array']['name']} metadata=1.2 UUID={each['array']['uuid']}\n")
        (tmp_path / each["offload_dir"].lstrip("/")).chmod(0o1777)
        unit = files(filesystem["mount_point"], filesystem["uuid"], each["name"])
        for change in changes(unit, str(tmp_path), each["name"]):
            apply(change)
    (tmp_path / "etc/fstab").write_text("".join(lines))
    (tmp_path / "etc/mdadm").mkdir(exist_ok=True)
    (tmp_path / "etc/mdadm/mdadm.conf").write_text("".join(conf))
    (tmp_path / "etc/mdadm.conf").write_text("".join(conf))
    (tmp_path / "etc/tunetool/node.json").write_text(json.dumps(manifest))
    return manifest


def overview(
    root: Path, monkeypatch: pytest.MonkeyPatch, members: Sequence[str] = SERIALS, chunk: int = CHUNK
) -> dict[str, str]:
    """What differs from what is asked, by name."""
    manifest = json.loads((root / "etc/tunetool/node.json").read_text())
    of_md = {"md127": manifest["volumes"][0], "md126": manifest["volumes"][1]}

    def signatures(names: Sequence[str]) -> list[Signature]:
        return [Signature(name, "xfs", of_md[name]["name"], of_md[name]["filesystem"]["uuid"]) for name in names]

    monkeypatch.setattr(before_changes, "examine", lambda names: {})
    monkeypatch.setattr(volume_apply, "read_signatures", signatures)
    monkeypatch.setattr(file_system, "run", lambda *argv, **_: Result(0, XFS_INFO, ""))
    monkeypatch.setattr(mount_point, "look_beneath", lambda path: Directory(True, True))
    monkeypatch.setattr(several, "look", lambda path: Directory(True, True))
    asked = Asked(NAME, "raid0", chunk, tuple(members), len(members))
    differences = before_changes.overview(asked, {"filesystem": wishes_for_several(manifest)}, str(root))
    return {each.name: each.found for each in differences}


def test_a_built_node_of_numa_arrays_has_no_difference(
    tmp_path: Path, built: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert validate(built) == []
    assert overview(tmp_path, monkeypatch) == {}
    assert not [check for check in run_checks(built, str(tmp_path)) if check.status == "fail" or check.warns]


def test_a_difference_names_the_volume_of_its_array(
    tmp_path: Path, built: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = overview(tmp_path, monkeypatch, chunk=2**19)
    assert wrong == {"array.chunk[numa0]": "1 MiB", "array.chunk[numa1]": "1 MiB"}
    fewer = overview(tmp_path, monkeypatch, members=SERIALS[:7])
    assert fewer == {"array.members": "8; with a volume and not asked for: `LAB1NV8`"}
    for path in ("etc/mdadm/mdadm.conf", "etc/mdadm.conf"):
        lines = (tmp_path / path).read_text().splitlines(keepends=True)
        (tmp_path / path).write_text(lines[1])
    fstab = tmp_path / "etc/fstab"
    fstab.write_text(fstab.read_text().splitlines(keepends=True)[0])
    assert set(overview(tmp_path, monkeypatch)) == {"mdadm.conf[numa0]", f"fstab[{POINT}/numa1][numa1]"}


def test_a_drive_on_another_numa_node_is_a_warning(tmp_path: Path, built: dict[str, Any]) -> None:
    """In the words of `site.yml` and `inspect`; the node is well."""
    (check,) = [each for each in run_checks(built, str(tmp_path)) if each.id == "array.numa"]
    assert (check.status, check.warns) == ("pass", False)
    (place,) = tmp_path.glob("sys/devices/pci*/**/nvme/nvme3/numa_node")
    place.write_text("1\n")
    checks = [each for each in run_checks(built, str(tmp_path)) if each.id == "array.numa"]
    (away,) = moved(volumes_of(built), {"LAB1NV3": 1})
    (check,) = checks
    assert (check.status, check.warns) == ("pass", True)
    assert (check.found, check.remedy) == (f"`numa0`: {away.found}", f"`numa0`: {away.hint}")
    result = of_checks(checks, [], 0)
    assert (result.status, result.failed) == ("pass", [])
    assert result.warnings == [f"array.numa: `numa0`: `LAB1NV3` on 1, expected {check.expected}: {check.remedy}"]
    assert of_checks(checks, ["array.*"], 0).warnings == []


def test_a_lost_drive_is_of_one_volume(tmp_path: Path, built: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sys/devices/virtual/block/md126/md/dev-nvme4n1/block").unlink()
    (tmp_path / "sys/block/nvme4n1").unlink()
    found = overview(tmp_path, monkeypatch, members=[])
    assert found["array.members[numa1]"].endswith("missing: `LAB1NV4`")
    assert not [name for name in found if "numa0" in name]
    (check,) = [each for each in run_checks(built, str(tmp_path)) if each.id == "array.members"]
    assert check.status == "fail"
    assert check.found.startswith("`numa1`: ")


@pytest.fixture
def node(tmp_path: Path) -> Machine:
    manifest = lay_out_numa(tmp_path)
    (tmp_path / "etc/tunetool/node.json").write_text(json.dumps(manifest))
    drives, arrays = read_drives(str(tmp_path)), read_arrays(str(tmp_path))
    blocks = {}
    for of_node, serials in enumerate(MINE):
        for each in drives:
            if each.serial in serials:
                blocks[each.name] = block(each.name, serials.index(each.serial), of_node)
    return Machine(
        drives=drives,
        signatures={name: [label(name, int(each.name[-1]))] for name, each in blocks.items()},
        superblocks=blocks,
        arrays=arrays,
        under={array.device: frozenset(disks_under(str(tmp_path), array.device)) for array in arrays},
        inside={
            array.device: [Signature(array.device, "xfs", str(array.name)[-5:], f"{number}-fs")]
            for number, array in enumerate(arrays)
        },
        manifest=manifest,
        unreadable={},
        volumes=known_volumes(str(tmp_path)),
    )


def test_a_teardown_takes_every_array_that_its_plan_names(node: Machine) -> None:
    removal = plan_several(node, POINT)
    assert removal.problems == ()
    assert verdicts(removal) == {"LAB1SYS": IGNORE, **dict.fromkeys(SERIALS, WIPE)}
    assert [(place.mount_point, place.array_uuid) for place in removal.places] == [
        (f"{POINT}/numa0", UUIDS[0]),
        (f"{POINT}/numa1", UUIDS[1]),
    ]
    assert [list(place.serials) for place in removal.places] == MINE
    text = describe(removal, [])
    assert "would be lost: volume `numa1` on drives `LAB1NV2`, `LAB1NV4`, `LAB1NV6`, `LAB1NV8`" in text
    assert consent_problem(removal, {}, None) == "nothing is removed without a plan"
    wipes, allowed = consent(removal)
    assert consent_problem(removal, wipes, allowed) is None
    inside = {**node.inside, "md126": [Signature("md126", "xfs", "numa1", "made again")]}
    since = plan_several(replace(node, inside=inside), POINT)
    assert "holds something else since" in str(consent_problem(since, wipes, allowed))
    del wipes["LAB1NV3"]
    assert "does not name drive `LAB1NV3`" in str(consent_problem(removal, wipes, allowed))


@pytest.mark.parametrize("user", [True, False], ids=["held by the kernel", "umount fails"])
def test_a_teardown_that_ends_leaves_every_volume_mounted(
    node: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: bool
) -> None:
    """The second volume cannot be let go, and the first one was unmounted by then."""
    mounted = [each for each in read_mounts(str(tmp_path)) if each.mount_point.startswith(POINT)]
    now = list(mounted)

    def run(argv: Sequence[str]) -> Result:
        command, point = argv
        (mount,) = [each for each in mounted if each.mount_point == point]
        if command == "umount" and point.endswith("numa1") and not user:
            raise CommandError("target is busy")
        (now.remove if command == "umount" else now.append)(mount)
        return Result(0, "", "")

    monkeypatch.setattr(removal_apply, "run", run)
    monkeypatch.setattr(removal_apply, "read_mounts", lambda: now)
    monkeypatch.setattr(removal_apply, "claim_problem", lambda path: "busy" if path == "/dev/md126" else None)
    monkeypatch.setattr(removal_apply.time, "sleep", lambda seconds: None)
    removal = plan_several(node, POINT)
    ledger = Ledger(None, acting=True)
    with pytest.raises((Refusal, CommandError), match="busy"):
        removal_apply.Job(removal, removal.volume, "teardown", "", ledger).unmount()  # type: ignore[arg-type]
    assert sorted(each.mount_point for each in now) == [f"{POINT}/numa0", f"{POINT}/numa1"]
    assert [entry["before_header"] for entry in ledger.diff if "numa0" in entry["before_header"]] == []


def test_what_is_not_its_arrays_is_not_torn_down(node: Machine) -> None:
    strange = {**node.signatures, "nvme4n1": [label("nvme4n1", 1), Signature("nvme4n1", "gpt", None, None)]}
    removal = plan_several(replace(node, signatures=strange), POINT)
    assert verdicts(removal)["LAB1NV4"] == REFUSE
    assert "holds more than the array: gpt" in removal.problems[0]
    blocks = {**node.superblocks, "nvme4n1": replace(node.superblocks["nvme4n1"], uuid="5:5:5:5")}
    removal = plan_several(replace(node, superblocks=blocks), POINT)
    assert verdicts(removal)["LAB1NV4"] == REFUSE


def test_a_cut_off_build_of_arrays_is_torn_down_by_its_notes(node: Machine) -> None:
    blocks = {name: each for name, each in node.superblocks.items() if each.name.endswith("0")}
    signatures = {name: node.signatures[name] for name in blocks}
    drives = [
        each if each.name in blocks else replace(each, uses=(), arrays=(), idle_arrays=()) for each in node.drives
    ]
    begun = replace(node, manifest=None, superblocks=blocks, signatures=signatures, drives=drives)
    removal = plan_several(begun, POINT)
    assert removal.problems == ()
    assert {serial for serial, found in verdicts(removal).items() if found == WIPE} == set(MINE[0])
    assert [(place.name, place.array_uuid) for place in removal.places] == [("numa0", UUIDS[0]), ("numa1", UUIDS[1])]


def test_the_notes_say_whose_the_drives_of_an_array_are(node: Machine) -> None:
    """Without a manifest, too: a copy of a member is somebody's, and another name makes no other array."""
    first = next(each for each in node.drives if each.serial == "LAB1NV1")
    copy = replace(first, name="nvme9n1", serial="COPY", uses=(), arrays=())
    begun = replace(
        node,
        manifest=None,
        drives=[*node.drives, copy],
        signatures={**node.signatures, copy.name: [label(copy.name, 0)]},
        superblocks={**node.superblocks, copy.name: block(copy.name, 0)},
    )
    removal = plan_several(begun, POINT)
    assert verdicts(removal)["COPY"] == REFUSE
    assert removal.problems[0].startswith(f"drive `COPY` (nvme9n1) carries the label of `{NAME}_numa0`")
    renamed = {name: replace(each, name="else") for name, each in node.superblocks.items()}
    removal = plan_several(replace(node, manifest=None, superblocks=renamed), POINT)
    assert removal.problems == ()
    assert {serial for serial, found in verdicts(removal).items() if found == WIPE} == {*SERIALS}
    assert [place.filesystem_uuid for place in removal.places] == ["1-fs", "0-fs"]
    # A volume that was only noted says nothing about what somebody has put on its drives.
    left = {name: each for name, each in node.superblocks.items() if each.name.endswith("0")}
    strange = {**{name: node.signatures[name] for name in left}, "nvme4n1": [Signature("nvme4n1", "ext4", None, "1")]}
    idle = [each if each.name in left else replace(each, uses=(), arrays=(), idle_arrays=()) for each in node.drives]
    only = replace(node, manifest=None, drives=idle, superblocks=left, signatures=strange)
    assert plan_several(only, POINT).problems == ()
    assert verdicts(plan_several(only, POINT))["LAB1NV4"] == IGNORE


def swapped(node: Machine, numa_node: int | None) -> Machine:
    old = next(each for each in node.drives if each.serial == "LAB1NV4")
    new = replace(old, name="nvme9n1", serial="NEW", uses=(), arrays=(), numa_node=numa_node)
    return replace(node, drives=[*(each for each in node.drives if each is not old), new])


def test_a_replacement_takes_the_array_of_that_node_alone(node: Machine) -> None:
    swap = Swap("LAB1NV4", "NEW", Criteria(8), {})
    removal = plan_replacement(swapped(node, 1), NAME, POINT, swap)
    assert removal.problems == ()
    rest = [serial for serial in MINE[1] if serial != "LAB1NV4"]
    kept = {"LAB1SYS": IGNORE, **dict.fromkeys(MINE[0], IGNORE)}
    assert verdicts(removal) == {**kept, **dict.fromkeys(rest, WIPE), "NEW": TAKE}
    assert [row.reason for row in removal.decisions if row.drive.serial == "LAB1NV1"] == ["keeps volume `numa0`"]
    assert [place.name for place in removal.places] == ["numa1"]
    first, second = removal.noted
    assert first == node.volumes["LAB1NV1"]
    assert (second.name, second.serials) == ("numa1", ("LAB1NV2", "NEW", "LAB1NV6", "LAB1NV8"))
    assert second.uuid not in UUIDS
    # Cut off after that was noted: the rest is the build's.
    noted = by_serial_of(removal.noted)
    assert plan_replacement(replace(swapped(node, 1), manifest=None, volumes=noted), NAME, POINT, swap).done


def test_one_left_alone_is_known_whole_after_a_cut(node: Machine, tmp_path: Path) -> None:
    """Its line in fstab is by the UUID of a file system that no drive tells any more, and the manifest is gone."""
    assert node.manifest is not None
    (tmp_path / "etc/tunetool/node.json").unlink()
    noted = [replace(node.volumes["LAB1NV1"], as_built=node.manifest["volumes"][0]), node.volumes["LAB1NV2"]]
    note(noted, str(tmp_path))
    known = known_volumes(str(tmp_path))
    lost = [each for each in swapped(node, 1).drives if each.serial not in ("LAB1NV1", "NEW")]
    new = replace(lost[-1], name="nvme9n1", serial="NEW", uses=(), arrays=(), numa_node=0)
    blocks = {name: each for name, each in node.superblocks.items() if name not in ("nvme1n1", "nvme4n1")}
    cut = replace(node, manifest=None, volumes=known, superblocks=blocks, inside={}, arrays=[], under={})
    expected = (node.manifest["volumes"][0]["filesystem"]["uuid"], f"{POINT}/numa0")
    swap = Swap("LAB1NV1", "NEW", Criteria(8), {})
    torn_down = plan_several(replace(cut, drives=lost), "/elsewhere")
    assert (torn_down.places[0].filesystem_uuid, torn_down.places[0].mount_point) == expected
    four = next(each for each in node.drives if each.serial == "LAB1NV4")
    removal = plan_replacement(replace(cut, drives=[*lost, four, new]), NAME, "/elsewhere", swap)
    assert removal.problems == ()
    assert (removal.places[0].filesystem_uuid, removal.places[0].mount_point) == expected


def test_nothing_is_noted_of_a_replacement_that_is_refused(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a manifest the note alone says whose the drives are that still carry the old array's label."""
    done: list[str] = []
    refused = [True]

    def unmount(job: removal_apply.Job) -> None:
        if refused[0]:
            raise Refusal("has a user")
        done.append("unmount")

    monkeypatch.setattr(removal_apply.Job, "unmount", unmount)
    monkeypatch.setattr(removal_apply.Job, "wipe", lambda job: done.append("wipe"))
    monkeypatch.setattr(removal_apply.Job, "forget", lambda job: done.append("forget"))
    monkeypatch.setattr(removal_apply, "note", lambda volumes: done.append("note"))
    monkeypatch.setattr(removal_apply, "forget", lambda: done.append("forget the manifest"))
    removal = plan_replacement(swapped(node, 1), NAME, POINT, Swap("LAB1NV4", "NEW", Criteria(8), {}))
    job = removal_apply.Job(removal, removal.volume, "replace", "", Ledger(None, acting=True))  # type: ignore[arg-type]
    with pytest.raises(Refusal):
        job.run({})
    assert done == []
    refused.clear()
    refused.append(False)
    job.run({})
    assert done == ["unmount", "wipe", "forget", "note", "forget the manifest"]


def test_an_array_beside_that_could_not_be_kept_refuses(node: Machine) -> None:
    """All of its drives are there, one under another name since md lost it: nothing could be built after the removal."""
    lost = [replace(each, state="broken") if each.device == "md127" else each for each in node.arrays]
    swap = Swap("LAB1NV4", "NEW", Criteria(8), {})
    (problem,) = plan_replacement(replace(swapped(node, 1), arrays=lost), NAME, POINT, swap).problems
    assert problem.startswith("volume `numa0`: array `md127` is broken: ")
    idle = [replace(each, state="inactive") if each.device == "md127" else each for each in node.arrays]
    assert plan_replacement(replace(swapped(node, 1), arrays=idle), NAME, POINT, swap).problems == ()


@pytest.mark.parametrize("numa_node", [0, None])
def test_a_drive_of_another_node_replaces_none(node: Machine, numa_node: int | None) -> None:
    removal = plan_replacement(swapped(node, numa_node), NAME, POINT, Swap("LAB1NV4", "NEW", Criteria(8), {}))
    (problem,) = removal.problems
    assert problem.startswith("drive `NEW` is not on the NUMA node of volume `numa1`. hint:")


@pytest.mark.parametrize("firmware", [0, None])
def test_a_drive_beside_the_others_comes_whatever_they_say(node: Machine, firmware: int | None) -> None:
    """The firmware names another NUMA node by now, or none: the slots are the same, and so is the way to them."""
    there = swapped(node, firmware)
    drives = [replace(each, numa_node=firmware) if each.serial in MINE[1] else each for each in there.drives]
    swap = Swap("LAB1NV4", "NEW", Criteria(8), {})
    assert plan_replacement(replace(there, drives=drives), NAME, POINT, swap).problems == ()
    # One beside the wrong ones shows nothing of its own slot.
    apart = [replace(each, numa_node=1) if each.serial == "LAB1NV2" else each for each in drives]
    assert plan_replacement(replace(there, drives=apart), NAME, POINT, swap).problems != ()


def test_where_none_has_a_numa_node_a_sole_drive_is_replaced(node: Machine) -> None:
    sole = {**by_serial_of([volume(0, MINE[0])]), "LAB1NV4": volume(1, ["LAB1NV4"])}
    left = {name: each for name, each in node.superblocks.items() if each.name.endswith("0")}
    there = replace(swapped(node, None), manifest=None, volumes=sole, superblocks=left)
    swap = Swap("LAB1NV4", "NEW", Criteria(5), {})
    assert plan_replacement(there, NAME, POINT, swap).problems != ()
    nowhere = [replace(each, numa_node=None) for each in there.drives]
    assert plan_replacement(replace(there, drives=nowhere), NAME, POINT, swap).problems == ()


@pytest.mark.parametrize("check_mode", [False, True])
def test_a_run_cut_between_two_arrays_makes_the_second(monkeypatch: pytest.MonkeyPatch, check_mode: bool) -> None:
    pytest.importorskip("ansible", reason="Ansible's control side needs Python 3.11")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    module = importlib.import_module("plugins.modules.raid_array")
    # The module has these classes by another name.
    known = {serial: module.ArrayVolume(**vars(each)) for serial, each in KNOWN.items()}
    steps: list[str] = []
    there = labels(0)
    blocks = {name: block(name, OF[0].index(each.serial)) for each in DRIVES for name in [each.name] if name in there}

    def array_of(uuid: str) -> Array:
        node = UUIDS.index(uuid)
        names = tuple(each.name for each in DRIVES if each.serial in OF[node])
        return Array(f"md12{7 - node}", uuid, f"{NAME}_numa{node}", "raid0", CHUNK, 4, "clean", names)

    for name, stand_in in {
        "members_by_serial": lambda serials: [each for each in DRIVES if each.serial in serials],
        "known_volumes": lambda groups: known,
        "built_manifest": lambda: None,
        "read_drives": lambda: DRIVES,
        "read_arrays": lambda: [array_of(UUIDS[0])],
        "examine": lambda names: {name: blocks[name] for name in names if name in blocks},
        "read_signatures": lambda names: [each for name in names for each in there.get(name, ())],
        "contents_text": lambda drives: "",
        "held": lambda drives: contextlib.nullcontext(),
        "not_writable": lambda: [],
        "refuse_unless_blank": lambda drives, deep=False: steps.append(f"blank {len(drives)}"),
        "note": lambda volumes: steps.append(f"note {len(volumes)}"),
        "forget_volume": lambda: steps.append("forget"),
        "begin": lambda drawn, volume: steps.append(f"begin {volume}") or drawn,
        "create": lambda name, chunk, drives, uuid, level: steps.append(f"create {name} {len(drives)} {uuid}"),
        "settled": array_of,
        "clear_beginning_of": lambda array, wiped: steps.append(f"clear {array.device} {wiped}"),
        "note_as_made": lambda uuid, device, volume: steps.append(f"made {volume}"),
        "remember": lambda module, ledger, arrays: [],
    }.items():
        monkeypatch.setattr(module, name, stand_in)
    asked = SimpleNamespace(
        params={"wipes": [], "serials": OF[0] + OF[1], "name": NAME, "groups": "numa", "chunk": "1MiB"},
        check_mode=check_mode,
        change_begins=lambda: steps.append("begins"),
        get_bin_path=lambda name: name,
    )

    answer = module.converge_several(asked)

    made = ["begins", "note 2", "blank 4", "blank 4", "begin numa1", f"create {NAME}_numa1 4 {UUIDS[1]}"]
    made += ["clear md126 False", "made numa1", "begins"]
    assert steps == ["blank 4", *([] if check_mode else made)]
    assert [(each["name"], each["new"]) for each in answer["volumes"]] == [("numa0", False), ("numa1", True)]
    uuids = [each["array"]["uuid"] for each in answer["volumes"]]
    assert uuids == [UUIDS[0], None if check_mode else UUIDS[1]]
    # One of the second array's drives lost its label: nobody makes it anew over the others.
    there.update(labels(1))
    del there["nvme4n1"]
    blocks.update({f"nvme{number}n1": block(f"nvme{number}n1", role, 1) for role, number in ((0, 2), (2, 6), (3, 8))})
    steps.clear()
    with pytest.raises(module.ArrayRefusal, match="no superblock, while the others have one"):
        module.converge_several(asked)
    assert steps == []


class Ended(Exception):
    """The module's end, with its answer."""


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    drives: Sequence[Drive],
    *,
    plan: bool = False,
    there: Any = None,
    left: str = "",
    noted: create.Begun | None = None,
    strange: dict[str, Superblock] | None = None,
) -> Any:
    """The answer of nvme_drives on a node with these drives. ``there``: what lies on them; ``left``: the volume that is
    broken and left alone; ``noted``: what is of the array that was begun; ``strange``: members of other arrays."""
    pytest.importorskip("ansible", reason="Ansible's control side needs Python 3.11")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    module = importlib.import_module("plugins.modules.nvme_drives")
    known = {
        serial: module.ArrayVolume(**{**vars(each), "as_built": {"name": left} if each.name == left else None})
        for serial, each in KNOWN.items()
    }
    slots = {each.name: (OF[each.numa_node or 0].index(each.serial), each.numa_node or 0) for each in DRIVES}
    for attribute, stand_in in {
        "begun": lambda volume: noted if volume == "numa1" else None,
        "read_drives": lambda: list(drives),
        "read_contents": lambda drives, deep: (there or {}, {}),
        "contents_hash": lambda drive: drive.serial,
        "examine": lambda names: {name: (strange or {}).get(name) or block(name, *slots[name]) for name in names},
        "read_arrays": lambda: [],
        "devices_of": lambda drive: {},
        "built_manifest": lambda: None,
        "obstacles": lambda *_, **__: [],
        "overview": lambda *_: [],
        "read_text": lambda path: None,
        "known_volumes": lambda groups: known if there else {},
        "anything_of_ours": lambda: False,
    }.items():
        monkeypatch.setattr(module, attribute, stand_in)
    said: list[str] = []

    def end(**answer: Any) -> None:
        raise Ended({**answer, "warned": said})

    array = {"name": NAME, "adopt": False, "groups": "numa"}
    params = {"count": 8, "plan": plan, "wipes": [], "array": array, "level": "raid0", "mount_point": "", "wishes": {}}
    fake = SimpleNamespace(params=params, exit_json=end, fail_json=end, warn=said.append)
    with pytest.raises(Ended) as caught:
        module.report(fake, Criteria(count=8), CHUNK)
    return caught.value.args[0]


def test_the_choice_says_the_groups_and_refuses_a_stray(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = chosen(monkeypatch, DRIVES)
    assert len(answer["selected"]) == 8
    assert answer["warned"] == ["drives of each volume: `numa0` 4, `numa1` 4"]
    part = chosen(monkeypatch, DRIVES, plan=True)["plan"]
    assert part["array_action"] == "create"
    assert part["array_reason"] == "RAID0 for each NUMA node; drives of each volume: `numa0` 4, `numa1` 4"
    stray = [replace(DRIVES[0], numa_node=None), *DRIVES[1:]]
    refused = chosen(monkeypatch, stray)
    assert refused["msg"] == (
        "`S001`: the firmware names no NUMA node, so `raid_array_groups: numa` has no place for it. hint: "
        "`raid_array_groups: all`; nothing was changed"
    )
    assert "selected" not in refused
    assert chosen(monkeypatch, stray, plan=True)["plan"]["array_action"] == "refuse"


def test_the_choice_says_what_is_away_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noted by a run that was cut off; no manifest tells the next one."""
    away = [replace(each, numa_node=0) if each.serial == "S002" else each for each in DRIVES]
    plain = "drives of each volume: `numa0` 4, `numa1` 4"
    expected = f"{plain}; away from the NUMA node of `numa1`: `S002` on 0"
    assert chosen(monkeypatch, away, there=labels(0))["warned"] == [expected]
    # Also where all arrays are there.
    assert chosen(monkeypatch, away, there=labels(0, 1))["warned"] == [expected]
    assert chosen(monkeypatch, DRIVES, there=labels(0, 1))["warned"] == []


def test_a_torn_array_is_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    part = chosen(monkeypatch, DRIVES, plan=True, there=labels(0, 1))["plan"]
    assert part["array_action"] == "keep"
    there = labels(0)
    assert chosen(monkeypatch, DRIVES, there=there)["warned"] == ["drives of each volume: `numa0` 4, `numa1` 4"]
    torn = {**there, **{name: each for name, each in labels(1).items() if name != "nvme4n1"}}
    refused = chosen(monkeypatch, DRIVES, there=torn)["msg"]
    assert refused.startswith(f"array `{NAME}_numa1` is on `S002`, `S006`, `S008` and not on `S004`, which are blank.")
    # Of too few drives only that is said.
    (problem, *_rest) = chosen(monkeypatch, DRIVES[:7], there=there)["msg"].splitlines()
    assert problem.startswith("8 drives asked for, 7 usable")


def test_volumes_on_drives_are_no_arrays() -> None:
    """Notes of the other kind are not taken for groups."""
    known: dict[str, AnyVolume] = {"S001": DriveVolume("drive0", "S001", "u")}
    assert [list(each.serials) for each in of_nodes([drive(1, numa_node=0)], known).volumes] == [["S001"]]


def test_an_array_torn_while_it_was_made_is_given_up_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drives of one that is made again hold what the old one held: only the note tells that it never ran."""
    torn = {**labels(0), **{name: each for name, each in labels(1).items() if name in ("nvme2n1", "nvme6n1")}}
    assert "not on `S004`, `S008`, which are blank" in chosen(monkeypatch, DRIVES, there=torn)["msg"]
    begun = create.Begun(UUIDS[1])
    refused = chosen(monkeypatch, DRIVES, there=torn, noted=begun)["msg"]
    assert "`tunetool provision --plan plan.json`" in refused
    assert "making its array was cut off: 2 of 4 members were written, and no data" in refused
    part = chosen(monkeypatch, DRIVES, plan=True, there=torn, noted=begun)["plan"]
    found = {each["serial"]: each["action"] for each in part["drives"]}
    assert found == {**dict.fromkeys(OF[0], KEEP), "S002": WIPE, "S006": WIPE, "S004": TAKE, "S008": TAKE}
    assert part["array_action"] == "create"
    # One that was made, or another one, may hold somebody's data.
    for noted in (create.Begun(UUIDS[1], "laid"), create.Begun(UUIDS[1], formatting=True), create.Begun(UUIDS[0])):
        assert "which are blank" in chosen(monkeypatch, DRIVES, there=torn, noted=noted)["msg"]


def test_an_array_that_lacks_a_drive_may_have_been_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The note is older than the array's last member: where a drive is away, the array may have been made and used."""
    there = {**labels(0), **{name: each for name, each in labels(1).items() if name != "nvme4n1"}}
    spare = replace(DRIVES[3], name="nvme9n1", serial="SPARE")
    drives = [*(each for each in DRIVES if each.serial != "S004"), spare]
    answer = chosen(monkeypatch, drives, plan=True, there=there, noted=create.Begun(UUIDS[1]))["plan"]
    assert WIPE not in {each["action"] for each in answer["drives"]}
    assert "and no data" not in str(answer)


def test_a_file_system_that_is_there_ends_the_note(
    built: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may have made it on an array of which only the beginning was noted; from now on it holds data."""
    noted = tmp_path / "etc/tunetool/array-numa0.begun"
    noted.write_text(UUIDS[0] + "\n")
    (tmp_path / "etc/tunetool/node.json").unlink()
    filesystem = built["volumes"][0]["filesystem"]
    found = [Signature("md127", "xfs", "numa0", filesystem["uuid"])]
    monkeypatch.setattr(volume_apply, "read_signatures", lambda names: found)
    monkeypatch.setattr(file_system, "run", lambda *argv, **_: Result(0, XFS_INFO, ""))
    wanted = {**wishes_for_several(built), "volumes": built["volumes"]}
    for acting in (False, True):
        assert create.begun(str(tmp_path), "numa0") == create.Begun(UUIDS[0])
        volumes = several.Volumes(wanted, Ledger(None, acting=acting), str(tmp_path))
        assert volumes.volume(built["volumes"][0]).make() == filesystem["uuid"]
    assert not noted.exists()


def test_the_old_drive_hides_no_array_that_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """It still answers, with the label of the old array, whose name is the new one's."""
    torn = {**labels(0), **{name: each for name, each in labels(1).items() if name != "nvme4n1"}}
    old, uuid = replace(DRIVES[1], name="nvme9n1", serial="OLD"), "5" * 8 + ":5" * 3
    there, strange = {**torn, old.name: [label(old.name, 1, uuid)]}, {old.name: block(old.name, 1, 1, uuid=uuid)}
    begun = create.Begun(UUIDS[1])
    part = chosen(monkeypatch, [*DRIVES, old], plan=True, there=there, noted=begun, strange=strange)["plan"]
    found = {each["serial"]: each["action"] for each in part["drives"]}
    assert found == {**dict.fromkeys([*OF[0], "OLD"], KEEP), **dict.fromkeys(OF[1], WIPE), "S004": TAKE, "OLD": REFUSE}


def test_the_drives_of_a_broken_volume_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = [each for each in DRIVES if each.serial != "S002"]
    assert "7 usable" in chosen(monkeypatch, lost, there=labels(0, 1))["msg"]
    answer = chosen(monkeypatch, lost, there=labels(0, 1), left="numa1")
    assert [each["serial"] for each in answer["selected"]] == OF[0]


def test_a_broken_array_beside_is_not_tuned(tmp_path: Path) -> None:
    manifest = lay_out_numa(tmp_path)
    first, second = ({"name": each["name"], "array": dict(each["array"])} for each in manifest["volumes"])
    second["array"]["uuid"] = "5:5:5:5"
    asked = {**dict.fromkeys(TUNING, ""), "read_ahead": "4MiB", "serials": MINE[0], "array_uuid": ""}
    with pytest.raises(Refusal, match="array 5:5:5:5 does not run"):
        TuningJob({**asked, "volumes": [first, second]}, Ledger(None, acting=False), str(tmp_path)).all()
    TuningJob({**asked, "volumes": [first, {**second, "left": True}]}, Ledger(None, acting=False), str(tmp_path)).all()


def test_an_array_whose_drives_are_all_gone_is_let_go(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = replace(
        node,
        drives=[each for each in node.drives if each.serial not in MINE[1]],
        superblocks={name: each for name, each in node.superblocks.items() if each.name.endswith("0")},
        signatures={name: each for name, each in node.signatures.items() if node.superblocks[name].name.endswith("0")},
        arrays=[replace(each, members=(None,) * 4) if each.device == "md126" else each for each in node.arrays],
        under={**node.under, "md126": frozenset()},
        inside={"md127": node.inside["md127"]},
    )
    removal = plan_several(gone, POINT)
    assert removal.problems == ()
    assert [[each.device for each in place.arrays] for place in removal.places] == [["md127"], ["md126"]]
    done: list[str] = []

    def run(argv: Sequence[str]) -> Result:
        done.append(" ".join(argv))
        return Result(0, "", "")

    monkeypatch.setattr(removal_apply, "run", run)
    monkeypatch.setattr(removal_apply, "read_mounts", lambda: [])
    monkeypatch.setattr(removal_apply, "claim_problem", lambda path: None)
    monkeypatch.setattr(removal_apply, "disks_under", lambda root, device: set())
    job = removal_apply.Job(removal, removal.volume, "teardown", "", Ledger(None, acting=True))  # type: ignore[arg-type]
    job.unmount()
    assert done == ["mdadm --stop /dev/md126"]
    monkeypatch.setattr(removal_apply, "disks_under", lambda root, device: {"nvme4n1"})
    with pytest.raises(Refusal, match="has drives again: nvme4n1"):
        job.unmount()
