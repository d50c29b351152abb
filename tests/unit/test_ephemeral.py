"""Ephemeral mode: when a boot builds and when it changes nothing; the configuration and the unit."""

from __future__ import annotations

import json
import subprocess
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import nvme_drive
from calls import call, imported_by
from machines import RECORDED, lay_out
from programs import need_program
from systemd_units import applied, complaints, left, refuses_another
from tunetool.node.array.md_arrays import read_arrays
from tunetool.node.common import manifest as manifests
from tunetool.node.ephemeral import boot_decision, boot_unit
from tunetool.node.ephemeral.boot_decision import BUILD, LEAVE, NOTHING, RESUME, ConfigError, Finding, Scene, decide
from tunetool.node.ephemeral.boot_unit import UNIT, changes
from tunetool.node.machine.drive_contents import Signature
from tunetool.node.machine.drives import Drive, read_drives
from tunetool.node.machine.file_system import BUILT
from tunetool.node.volume.unit_dropins import escape

MANIFEST: dict[str, Any] = json.loads((RECORDED / "built-manifest.json").read_text())
UUID = MANIFEST["array"]["uuid"]
CONFIG: dict[str, Any] = {
    "schema": "tunetool.ephemeral/1",
    "drives": {"model": "QEMU NVMe Ctrl", "size_bytes": 2**32, "transport": "pcie", "serials": []},
    "label": "nvme_raid0",
    "offload": {"uid": 0, "gid": 0, "mode": "1777"},
    "wait_seconds": 30,
}
SYSTEM = {"nvme0n1": [Signature("nvme0n1", "ext4", "labsystem", "1")]}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A recorded node whose array is mounted, and whose ninth drive belongs to somebody else."""
    root = str(lay_out("built", tmp_path_factory.mktemp("built")))
    drives = read_drives(root)
    contents = {drive.name: [own_label(drive.name)] for drive in drives if drive.arrays}
    return Scene(drives, {**contents, **SYSTEM}, {}, read_arrays(root), filesystem=True)


@pytest.fixture(scope="module")
def blank(recorded: Scene) -> Scene:
    """The same node after a stop and start: other serials, nothing on the drives."""
    return replace(
        recorded, drives=[handed_out(drive) for drive in recorded.drives], contents=SYSTEM, arrays=[], filesystem=False
    )


def handed_out(drive: Drive) -> Drive:
    if not drive.arrays:
        return drive
    return replace(drive, serial=drive.serial.replace("NV", "NEW"), uses=(), arrays=(), idle_arrays=())


def own_label(name: str) -> Signature:
    return Signature(name, "linux_raid_member", "node1:nvme_raid0", UUID)


def look(scene: Scene, **config: Any) -> Finding:
    return decide(MANIFEST, {**CONFIG, **config}, scene)


def test_blank_drives_are_built_whatever_their_serials(blank: Scene) -> None:
    finding = look(blank)
    assert finding.action == BUILD
    assert [drive.serial for drive in finding.members] == [f"LAB1NEW{number}" for number in range(1, 9)]


def test_our_array_is_left_alone(recorded: Scene) -> None:
    finding = look(recorded)
    assert (finding.action, finding.members) == (NOTHING, ())


def test_a_rebuild_goes_on_by_slot_and_only_with_its_mark(recorded: Scene) -> None:
    finding = look(replace(recorded, begun=UUID))
    assert finding.action == RESUME
    assert [drive.serial for drive in finding.members] == [member["serial"] for member in MANIFEST["array"]["members"]]
    assert look(replace(recorded, begun="0:0:0:0")).action == NOTHING


def test_our_array_without_a_file_system_is_left_without_a_mark(recorded: Scene) -> None:
    finding = look(replace(recorded, filesystem=False))
    assert finding.action == LEAVE
    assert "without the file system" in finding.line
    assert look(replace(recorded, filesystem=False, begun=UUID)).action == RESUME


def test_an_array_of_ours_that_cannot_serve_is_not_made_anew(recorded: Scene) -> None:
    broken = [replace(array, state="broken") for array in recorded.arrays]
    assert look(replace(recorded, arrays=broken)).action == LEAVE


REDUNDANT = {**MANIFEST, "array": {**MANIFEST["array"], "level": "raid10"}}


def mirrored(scene: Scene, *gone: int, **values: Any) -> Scene:
    """The scene with a RAID10 that lacks the members of these slots."""
    array = replace(scene.arrays[0], level="raid10", **values)
    members = tuple(None if slot in gone else name for slot, name in enumerate(array.members))
    return replace(scene, arrays=[replace(array, members=members)])


@pytest.mark.parametrize("gone", [(), (2,), (0, 3, 5, 6)])
def test_a_redundant_array_that_is_degraded_is_kept(recorded: Scene, gone: tuple[int, ...]) -> None:
    finding = decide(REDUNDANT, CONFIG, mirrored(recorded, *gone))
    assert (finding.action, finding.members) == (NOTHING, ())


def test_a_redundant_array_is_never_built_over_its_members(recorded: Scene, blank: Scene) -> None:
    lost = mirrored(recorded, 2, 3)
    contents = {**SYSTEM, **{name: [own_label(name)] for name in lost.arrays[0].members if name}}
    assert decide(REDUNDANT, CONFIG, replace(lost, contents=contents)).action == LEAVE
    half = replace(blank, contents={**SYSTEM, **{f"nvme{n}n1": [own_label(f"nvme{n}n1")] for n in (1, 3, 5, 7)}})
    finding = decide(REDUNDANT, CONFIG, half)
    assert finding.action == LEAVE
    assert "keeps nothing" not in finding.line
    assert decide(REDUNDANT, CONFIG, blank).action == BUILD


@pytest.mark.parametrize("number", [1, 7])
def test_some_members_among_blank_drives_are_left_and_named(blank: Scene, number: int) -> None:
    names = [f"nvme{index}n1" for index in range(1, number + 1)]
    finding = look(replace(blank, contents={**SYSTEM, **{name: [own_label(name)] for name in names}}))
    assert finding.action == LEAVE
    assert f"{number} of 8 drives are members" in finding.line
    assert all(f"`LAB1NEW{index}`" in finding.line for index in range(1, number + 1))


@pytest.mark.parametrize("kind", ["ext4", "xfs", "gpt", "LVM2_member", "zfs_member", "crypto_LUKS", "swap"])
def test_one_drive_that_holds_anything_leaves_all(blank: Scene, kind: str) -> None:
    finding = look(replace(blank, contents={**SYSTEM, "nvme3n1": [Signature("nvme3n1", kind, None, "abc")]}))
    assert finding.action == LEAVE
    assert f"`LAB1NEW3` (nvme3n1) holds {kind} UUID abc" in finding.line
    assert "\n" not in finding.line
    assert "hint: " in finding.line
    # The drive that was never ours is not a change.
    assert "LAB1SYS" not in finding.line


def change(scene: Scene, name: str, **values: Any) -> Scene:
    return replace(scene, drives=[replace(drive, **values) if drive.name == name else drive for drive in scene.drives])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"size_bytes": 2**32 + 4096}, "the drives are not alike: `LAB1NEW3`"),
        ({"lba_bytes": 4096}, "the drives are not alike: `LAB1NEW3`"),
        ({"partitions": ("nvme3n1p1",)}, "has partitions nvme3n1p1"),
        ({"uses": ("active swap",)}, "7 usable"),
        ({"serial": ""}, "has no serial number"),
        ({"model": "Another"}, "8 drives asked for, 7 usable"),
    ],
)
def test_drives_that_do_not_fit_are_left(blank: Scene, values: dict[str, Any], words: str) -> None:
    finding = look(change(blank, "nvme3n1", **values))
    assert finding.action == LEAVE
    assert words in finding.line


def test_seven_nine_and_unreadable_drives_are_left(blank: Scene) -> None:
    assert look(replace(blank, drives=blank.drives[:-1])).action == LEAVE
    ninth = replace(blank.drives[-1], name="nvme9n1", serial="NINE")
    assert "8 drives asked for, 9 match" in look(replace(blank, drives=[*blank.drives, ninth])).line
    finding = look(replace(blank, unreadable={"nvme3n1": "cannot be read: input/output error"}))
    assert (finding.action, "input/output error" in finding.line) == (LEAVE, True)


def test_pinned_serials_hold(blank: Scene) -> None:
    drives = dict(CONFIG["drives"], serials=[member["serial"] for member in MANIFEST["array"]["members"]])
    assert look(blank, drives=drives).action == LEAVE


def test_an_array_of_our_name_elsewhere_is_not_doubled(blank: Scene, recorded: Scene) -> None:
    other = replace(recorded.arrays[0], uuid="1:2:3:4", members=("sdb",), raid_disks=1)
    finding = look(replace(blank, arrays=[other]))
    assert finding.action == LEAVE
    assert "exists on other drives" in finding.line


STRANGER = "11111111:22222222:33333333:44444444"


def foreign_label(name: str) -> Signature:
    return Signature(name, "linux_raid_member", "node9:nvme_raid0", STRANGER)


def test_members_of_a_foreign_array_of_our_name_are_not_ours(blank: Scene) -> None:
    contents = {**SYSTEM, "nvme3n1": [foreign_label("nvme3n1")], "nvme4n1": [foreign_label("nvme4n1")]}
    finding = look(replace(blank, contents=contents))
    assert finding.action == LEAVE
    assert "that is not assembled" not in finding.line
    assert f"`LAB1NEW3` (nvme3n1) holds linux_raid_member label `node9:nvme_raid0` UUID {STRANGER}" in finding.line


def test_a_foreign_array_on_another_drive_stops_no_rebuild(blank: Scene) -> None:
    ninth = nvme_drive(9)
    contents = {**SYSTEM, ninth.name: [foreign_label(ninth.name)]}
    finding = look(replace(blank, drives=[*blank.drives, replace(ninth, model="QEMU NVMe Ctrl")], contents=contents))
    assert finding.action == BUILD, finding.line
    assert ninth.name not in [drive.name for drive in finding.members]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"level": "raid1"}, "level: expected raid0, found raid1"),
        ({"chunk_bytes": 65536}, "chunk: expected 1048576, found 65536"),
        ({"members": ("sdb", "sdc"), "raid_disks": 2}, "members: expected 8, found 2"),
    ],
)
@pytest.mark.parametrize("begun", ["", UUID])
def test_an_array_with_our_uuid_that_is_built_otherwise_is_left(
    recorded: Scene, begun: str, values: dict[str, Any], words: str
) -> None:
    finding = look(replace(recorded, arrays=[replace(recorded.arrays[0], **values)], begun=begun))
    assert finding.action == LEAVE
    assert words in finding.line


@pytest.mark.parametrize(("state", "cure"), [("suspended", "a RAID0 has neither"), ("readonly", "mdadm --readwrite")])
@pytest.mark.parametrize("begun", ["", UUID])
def test_a_halted_array_of_ours_is_neither_mounted_nor_written(
    recorded: Scene, begun: str, state: str, cure: str
) -> None:
    finding = look(replace(recorded, arrays=[replace(recorded.arrays[0], state=state)], begun=begun))
    assert finding.action == LEAVE
    assert f"`nvme_raid0` is {state}" in finding.line
    assert cure in finding.line


@given(st.dictionaries(st.integers(1, 8), st.sampled_from(["own", "ext4", "unreadable", "gone", "part"])))
def test_nothing_is_built_unless_all_are_blank(faults: dict[int, str]) -> None:
    scene = Scene([nvme_drive(number) for number in range(1, 9)])
    contents: dict[str, list[Signature]] = {}
    unreadable, drives = {}, []
    for each in scene.drives:
        fault = faults.get(int(each.name[4]))
        if fault in ("own", "ext4"):
            contents[each.name] = [own_label(each.name) if fault == "own" else Signature(each.name, "ext4", None, None)]
        if fault == "unreadable":
            unreadable[each.name] = "cannot be read"
        if fault != "gone":
            drives.append(replace(each, partitions=("p1",)) if fault == "part" else each)
    finding = look(Scene(drives, contents, unreadable))
    assert (finding.action == BUILD) == (not faults)


def test_the_manifest_gets_new_members_and_nothing_else(blank: Scene) -> None:
    after = boot_decision.with_members(MANIFEST, look(blank).members)
    assert manifests.validate(after) == []
    assert [member["serial"] for member in after["array"]["members"]] == [f"LAB1NEW{number}" for number in range(1, 9)]
    after["array"]["members"] = MANIFEST["array"]["members"]
    assert manifests.dump(after) == manifests.dump(MANIFEST)


def test_the_same_drives_are_the_same_manifest(recorded: Scene) -> None:
    members = [each for each in recorded.drives if each.arrays]
    assert manifests.dump(boot_decision.with_members(MANIFEST, members)) == manifests.dump(MANIFEST)


def test_the_configuration_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "ephemeral.json"
    path.write_text(boot_decision.dump(CONFIG))
    assert boot_decision.load(str(path)) == CONFIG
    path.write_text(boot_decision.dump({**CONFIG, "offload": None}))
    assert boot_decision.load(str(path))["offload"] is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema", "tunetool.ephemeral/2"),
        ("drives", {"model": None}),
        ("offload", {"uid": "root", "gid": 0, "mode": "1777"}),
        ("offload", {"uid": 0, "gid": 0, "mode": "rwx"}),
        ("wait_seconds", -1),
        ("surprise", 1),
    ],
)
def test_a_configuration_of_another_shape_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    document = {**deepcopy(CONFIG), key: value}
    path = tmp_path / "ephemeral.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"hint: "):
        boot_decision.load(str(path))
    with pytest.raises(ConfigError):
        boot_decision.dump(document)


@pytest.mark.parametrize("text", [None, "", "{", "[]"])
def test_a_configuration_that_cannot_be_read_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "ephemeral.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"hint: "):
        boot_decision.load(str(path))


@pytest.mark.parametrize(
    "path",
    ["/", "/mnt/nvme_raid0", "//mnt//a-b/", "/mnt/a b", "/.hidden/x", "/mnt/50%", "/mnt/ä", "/dev/disk/by-uuid/0-a"],
)
def test_units_are_named_as_systemd_names_them(path: str) -> None:
    need_program("systemd-escape")
    done = subprocess.run(["systemd-escape", "--path", path], capture_output=True, text=True, check=True)
    assert escape(path) == done.stdout.strip()


def files(*services: str, **filesystem: str) -> dict[str, str]:
    manifest = {**MANIFEST, "filesystem": {**MANIFEST["filesystem"], **filesystem}}
    return boot_unit.files(manifest, "/opt/tunetool/bin/tunetool", services, boot_decision.dump(CONFIG))


UNIT_PATH = f"/etc/systemd/system/{UNIT}"
REQUIRES = f"/etc/systemd/system/mnt-nvme_raid0.mount.requires/{UNIT}"


def test_the_unit_comes_before_mount_and_services() -> None:
    lines = files("slurmd.service")[UNIT_PATH].splitlines()
    assert "Before=mnt-nvme_raid0.mount slurmd.service" in lines
    assert f"ExecStart=/opt/tunetool/bin/tunetool ephemeral-rebuild --unless {MANIFEST['filesystem']['uuid']}" in lines
    assert "DefaultDependencies=no" in lines
    # Only the volume waits for it during a boot, and it does not wait for a drive that may be dead.
    assert not [line for line in lines if line.startswith(("Requires=", "WantedBy=", "Before=local-fs"))]
    assert not [line for line in lines if "settle" in line and not line.startswith("#")]


def test_systemd_accepts_the_files(tmp_path: Path) -> None:
    need_program("systemd-analyze")
    converge(tmp_path, files())
    units = tmp_path / "etc/systemd/system"
    (units / UNIT).write_text((units / UNIT).read_text().replace("/opt/tunetool/bin/tunetool", "/bin/true"))
    (units / "mnt-nvme_raid0.mount").write_text("[Mount]\nWhat=/dev/x\nWhere=/mnt/nvme_raid0\n")
    dropins = [path.name[:-2] for path in units.glob("*.d")]
    assert not complaints(units, [UNIT, "mnt-nvme_raid0.mount", *dropins], "tunetool", "nvme")


def converge(root: Path, wanted: dict[str, str]) -> list[str]:
    return applied(changes(wanted, str(root)), root)


def test_files_come_and_go(tmp_path: Path) -> None:
    assert converge(tmp_path, {}) == []
    assert converge(tmp_path, files()) == sorted(files())
    assert (tmp_path / REQUIRES[1:]).resolve() == tmp_path / UNIT_PATH[1:]
    assert converge(tmp_path, files()) == []
    assert converge(tmp_path, files("a.service")) == [UNIT_PATH]
    assert converge(tmp_path, {}) == sorted(files())
    assert left(tmp_path) == set()


def test_another_mount_point_and_layout_leave_nothing_behind(tmp_path: Path) -> None:
    converge(tmp_path, files())
    after = files(uuid="0-1", mount_point="/mnt/other")
    converge(tmp_path, after)
    assert left(tmp_path) == set(after)


def test_a_unit_of_our_name_that_is_not_ours_stays(tmp_path: Path) -> None:
    path = tmp_path / UNIT_PATH[1:]
    path.parent.mkdir(parents=True)
    path.write_text("[Unit]\n")
    refuses_another(changes, files(), tmp_path)


def test_the_program_says_that_it_is_off_and_imports_little() -> None:
    if Path(boot_decision.CONFIG_PATH).exists():
        pytest.skip("this machine is in ephemeral mode")
    done, imported = imported_by("ephemeral-rebuild", "--dry-run")
    assert done.returncode == 2, done.stderr
    assert imported & {"pydantic", "rich", "jinja2", "tunetool.record", "tunetool.verify"} == set()
    assert "ephemeral mode is off\nhint: set `ephemeral_enabled: true`" in done.stderr


def test_a_file_system_that_mkfs_did_not_finish_is_known(tmp_path: Path) -> None:
    need_program("mkfs.xfs")
    image = tmp_path / "image"
    with image.open("wb") as stream:
        stream.truncate(512 * 2**20)
    assert not BUILT.half_made(str(image), "made")
    subprocess.run(["mkfs.xfs", "-q", "-L", "made", str(image)], check=True)
    assert not BUILT.half_made(str(image), "made")
    with image.open("r+b") as stream:
        stream.seek(126)  # sb_inprogress
        stream.write(b"\x01")
    assert BUILT.half_made(str(image), "made")
    # The tools of XFS read that byte in the same way.
    done = call("xfs_db", "-r", "-c", "sb 0", "-c", "p inprogress", str(image), check=True)
    assert done.stdout == "inprogress = 1\n"
