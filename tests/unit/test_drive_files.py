"""Volumes on drives are removed, all or one, on the files of a node in a mount namespace, whenever the run is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from test_teardown_of_files import ARRAY, DRAINED, MANIFEST, PROGRAM, THEIRS, UNITS, UUID, on_a_node, put

from tunetool.node.array.drive_volumes import NOTES_PATH, DriveVolume, note
from tunetool.node.common import manifest as manifests
from tunetool.node.ephemeral import boot_unit
from tunetool.node.machine.fstab import with_entry
from tunetool.node.volume import late_mount, unit_dropins

OURS = [
    DriveVolume(f"drive{number}", f"S{number}", f"0000000{number}-402a-4a1f-b255-742e748c22f3") for number in range(3)
]
PLAN = 'removal = plan_removal(machine, "nvme_raid0", point + "/nvme_raid0")'
IMPORT = "from tunetool.node.removal.decision import plan_removal\n"
EACH = f"""{IMPORT}from tunetool.node.removal.drives import after_swap, plan_several
from tunetool.node.removal.decision import Removal
"""
ALL = PROGRAM.replace(IMPORT, EACH).replace(
    PLAN, f'removal = plan_several(machine, point + "/nvme_raid0") if machine.volumes else plan_removal{PLAN[22:]}'
)
ONE = (
    PROGRAM.replace(IMPORT, EACH)
    .replace("import TEARDOWN", "import REPLACE as TEARDOWN")
    .replace(
        PLAN,
        'removal = Removal(None, (), done=True) if "S1" not in machine.volumes else after_swap('
        'plan_several(machine, point + "/nvme_raid0", only="S1"), machine, "S1", "NEW")',
    )
)


def line_of(volume: DriveVolume, point: str, text: str) -> str:
    return with_entry(text, f"UUID={volume.uuid}", f"{point}/{volume.name}", "xfs", "noatime,nofail")


def drives(root: Path) -> None:
    """Make the files of a node with one volume those of a node with three, on a drive each."""
    before = json.loads((root / manifests.MANIFEST_PATH[1:]).read_text())
    point = before["filesystem"]["mount_point"]
    for change in [*late_mount.changes({}, str(root)), *boot_unit.changes({}, str(root))]:
        unit_dropins.apply(change)
    member = MANIFEST["array"]["members"][0]
    volumes: list[dict[str, Any]] = []
    text = THEIRS["fstab"]
    for volume in OURS:
        text = line_of(volume, point, text)
        place = f"{point}/{volume.name}"
        for change in late_mount.changes(late_mount.files(place, volume.uuid, volume.name), str(root), volume.name):
            unit_dropins.apply(change)
        one = {"uuid": volume.uuid, "name": volume.name, "level": "single", "chunk_bytes": 0}
        volumes.append(
            {
                "name": volume.name,
                "array": {**one, "members": [{**member, "serial": volume.serial}]},
                "filesystem": {**before["filesystem"], "uuid": volume.uuid, "mount_point": place},
                "offload_dir": None,
            }
        )
        (root / "mnt/nvme_raid0" / volume.name).mkdir()
    put(root / "etc", {"fstab": text, "mdadm/mdadm.conf": THEIRS["mdadm/mdadm.conf"]})
    common = {
        key: value for key, value in before.items() if key not in ("array", "filesystem", "offload_dir", "sha256")
    }
    manifests.write(
        {**common, "schema": manifests.SCHEMA_OF_SEVERAL, "volumes": volumes}, str(root / manifests.MANIFEST_PATH[1:])
    )
    note(OURS, str(root))


def kept(left: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in left.items() if not name.startswith("sbin/")}


def test_a_teardown_of_all_volumes_is_finished_by_the_next(tmp_path: Path) -> None:
    said, _ = on_a_node(tmp_path, ALL, tmp_path, drives)
    answers = json.loads(said)
    told = [at for at, *_ in answers]
    for name in (NOTES_PATH[len("/etc/") :], "node.json", *(late_mount.unit_of(each.name) for each in OURS)):
        assert any(name in at for at in told), (name, told)
    expected = {
        f"etc/{name}": text.encode("utf-8", "surrogateescape").decode("latin-1") for name, text in THEIRS.items()
    }
    for at, first, second, third, left, _tree in answers:
        assert (first, third) == (-9 if at else 0, 7), at
        assert second in (0, 7), at
        theirs = kept(left)
        if at:
            cut = [name for name, text in theirs.items() if text == "(empty)" and name != "mnt"]
            assert len(cut) <= 1, at
            theirs = {name: text for name, text in theirs.items() if name not in cut}
        assert theirs == {**expected, "mnt": "(empty)", DRAINED: "{}\n"}, at


def test_a_replacement_forgets_one_volume_and_knows_the_rest(tmp_path: Path) -> None:
    said, point = on_a_node(tmp_path, ONE, tmp_path, drives)
    answers = json.loads(said)
    told = [at for at, *_ in answers]
    assert [at for at in told if "drives.json" in at], told
    assert [at for at in told if "node.json" in at], told
    text = THEIRS["fstab"]
    for volume in (OURS[0], OURS[2]):
        text = line_of(volume, f"{point}/nvme_raid0", text)
    for at, first, second, third, left, _tree in answers:
        assert (first, third) == (-9 if at else 0, 7), at
        assert second in (0, 7), at
        assert left["etc/fstab"] == text.encode("utf-8", "surrogateescape").decode("latin-1"), at
        assert "etc/tunetool/node.json" not in left
        noted = {row["serial"]: row for row in json.loads(left["etc/tunetool/drives.json"])}
        assert {serial: row["name"] for serial, row in noted.items()} == {
            "S0": "drive0",
            "NEW": "drive1",
            "S2": "drive2",
        }
        assert (noted["S0"]["uuid"], noted["S2"]["uuid"]) == (OURS[0].uuid, OURS[2].uuid)
        assert f"etc/{UNITS}/{late_mount.unit_of('drive0')}" in left
        assert (UUID in json.dumps(noted), ARRAY in json.dumps(noted)) == (False, False)
