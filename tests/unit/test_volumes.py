"""A node with several volumes: its manifest, and its checks on a recorded machine with a file system on each drive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from machines import RECORDED, lay_out_drives
from tunetool.node.array.present import present
from tunetool.node.audit.manifest_checks import run_checks
from tunetool.node.common import manifest as manifests
from tunetool.node.common.drift import built_manifest
from tunetool.node.common.manifest import built_members, each_volume
from tunetool.node.tuning.apply import members_and_arrays

ONE: dict[str, Any] = json.loads((RECORDED / "built-manifest.json").read_text())
OF_A_VOLUME = ("array", "filesystem", "offload_dir")


@pytest.fixture
def several(tmp_path: Path) -> dict[str, Any]:
    return lay_out_drives(tmp_path)


def test_the_only_volume_is_the_manifest_as_it_is() -> None:
    assert each_volume(ONE) == [("", ONE)]
    assert built_members(ONE) == ONE["array"]["members"]
    assert built_members({**ONE, "array": None}) == []


def test_each_volume_is_as_if_the_node_had_it_alone(several: dict[str, Any]) -> None:
    volumes = each_volume(several)
    assert [name for name, _ in volumes] == [f"drive{number}" for number in range(8)]
    for (_, volume), part in zip(volumes, several["volumes"], strict=True):
        assert {key: volume[key] for key in OF_A_VOLUME} == {key: part[key] for key in OF_A_VOLUME}
        assert "volumes" not in volume
        assert volume["memory"] == several["memory"]
    assert built_members(several) == ONE["array"]["members"]
    assert members_and_arrays(several) == ([member["serial"] for member in ONE["array"]["members"]], [])


def test_a_manifest_has_one_volume_or_a_list_of_them(tmp_path: Path, several: dict[str, Any]) -> None:
    path = tmp_path / "node.json"
    manifests.write(several, str(path))
    assert manifests.load(str(path)) == several == built_manifest(str(path))
    jsonschema.validate(several, manifests.SCHEMA)
    neither = {key: value for key, value in several.items() if key != "volumes"}
    both = {**several, **{key: ONE[key] for key in OF_A_VOLUME}}
    for wrong in (neither, both, {**neither, "array": ONE["array"]}, {**several, "volumes": []}):
        (problem,) = manifests.validate(wrong)
        assert "volumes" in problem
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, manifests.SCHEMA)


def test_a_drive_with_a_volume_is_found_by_its_serial(tmp_path: Path, several: dict[str, Any]) -> None:
    built = several["volumes"][2]["array"]
    there = present(built, str(tmp_path))
    assert there is not None
    assert (there.device, there.name, there.level, there.members) == ("nvme3n1", "drive2", "single", ("nvme3n1",))
    assert present({**built, "members": [{**built["members"][0], "serial": "GONE"}]}, str(tmp_path)) is None


def test_a_check_names_the_volumes_that_fail_it(tmp_path: Path, several: dict[str, Any]) -> None:
    before = {check.id: check for check in run_checks(several, str(tmp_path))}
    assert {before[each].status for each in ("array.assembled", "array.members", "filesystem.mounted")} == {"pass"}
    assert before["filesystem.geometry"].status == before["filesystem.options"].status == "pass"
    assert "array.initramfs" not in before
    mountinfo = tmp_path / "proc/self/mountinfo"
    lines = mountinfo.read_text().splitlines(keepends=True)
    mountinfo.write_text("".join(line for line in lines if "/drive3 " not in line and "/drive5 " not in line))
    checks = run_checks(several, str(tmp_path))
    (mounted,) = [check for check in checks if check.id == "filesystem.mounted"]
    assert mounted.status == "fail"
    assert mounted.found.startswith("`drive3`: `/mnt/nvme_raid0/drive3` is not a mount point")
    assert "; `drive5`: `/mnt/nvme_raid0/drive5` is not a mount point" in mounted.found
    assert "drive2" not in mounted.found
    assert len({check.id for check in checks}) == len(checks)
