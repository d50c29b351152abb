"""A node whose volume is its owner's: described, checked, never built and never removed."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from machines import RECORDED, lay_out
from tunetool.node.audit.manifest_checks import run_checks
from tunetool.node.common import manifest as manifests
from tunetool.node.common.check_result import Check
from tunetool.node.common.drift import built_manifest, known_manifest
from tunetool.node.common.refusal import Refusal
from tunetool.node.removal import facts
from tunetool.node.volume.named_volume import describe_volume

ROOT = Path(__file__).parents[2]
BUILT: dict[str, Any] = json.loads((RECORDED / "built-manifest.json").read_text())
POINT = "/srv/system"
UUID = "f8756615-c4a4-4d1b-b4b2-e29046de2e47"
NOTHING = {"hugepages": [], "shm_bytes": None, "memlock": None}


@pytest.fixture
def node(tmp_path: Path) -> Path:
    return lay_out("built", tmp_path)


@pytest.fixture
def named(node: Path) -> dict[str, Any]:
    volume = describe_volume(POINT, str(node))
    gds = {"mode": "off", "reasons": []}
    return {**BUILT, "array": None, "filesystem": volume, "memory": NOTHING, "offload_dir": None, "gds": gds}


def mounted(root: Path, change: Callable[[str], str]) -> None:
    path = root / "proc/self/mountinfo"
    path.write_text(change(path.read_text()))


def storage(checks: list[Check]) -> dict[str, Check]:
    return {check.id: check for check in checks if check.status != "skip" and check.id != "node.reboot"}


def test_a_mounted_volume_is_described_and_passes(node: Path, named: dict[str, Any]) -> None:
    assert named["filesystem"]["type"] == "ext4"
    assert (named["filesystem"]["uuid"], named["filesystem"]["mount_point"]) == (UUID, POINT)
    assert manifests.validate(named) == []
    jsonschema.validate(named, manifests.SCHEMA)
    checks = storage(run_checks(named, str(node)))
    assert {name: check.status for name, check in checks.items()} == {
        "filesystem.mounted": "pass",
        "filesystem.writable": "pass",
    }


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda text: re.sub(rf".* {POINT} .*\n", "", text), "not a mount point"),
        (lambda text: text.replace(f"259:1 / {POINT}", f"254:0 / {POINT}"), "another file system"),
        (lambda text: text.replace(f"{POINT} rw,relatime shared:84 - ext4", f"{POINT} rw shared:84 - xfs"), "xfs"),
        (lambda text: text.replace(f"259:1 / {POINT}", f"259:1 /x {POINT}"), "its directory `/x`, not `/`"),
        (lambda text: text + "900 27 0:77 / /srv rw - tmpfs t rw\n", "a mount of `t` at `/srv` hides"),
    ],
    ids=["unmounted", "another", "another type", "another directory", "hidden"],
)
def test_what_is_not_there_any_more_is_named(
    node: Path, named: dict[str, Any], change: Callable[[str], str], word: str
) -> None:
    mounted(node, change)
    check = storage(run_checks(named, str(node)))["filesystem.mounted"]
    assert (check.status, bool(check.remedy)) == ("fail", True)
    assert word in check.found


def test_without_udev_a_volume_is_not_said_to_be_another(node: Path, named: dict[str, Any]) -> None:
    shutil.rmtree(node / "dev/disk/by-uuid")
    check = storage(run_checks(named, str(node)))["filesystem.mounted"]
    assert check.status == "unknown"
    assert "its UUID is not known" in check.found
    assert "umount" not in check.remedy


def test_a_volume_without_a_uuid_is_known_by_its_type(node: Path) -> None:
    mounted(node, lambda text: text + "300 27 0:60 / /net rw - nfs4 server:/export rw\n")
    volume = describe_volume("/net/", str(node))
    assert (volume["uuid"], volume["type"], volume["mount_point"]) == ("", "nfs4", "/net")
    named = {**BUILT, "array": None, "filesystem": volume, "memory": NOTHING, "offload_dir": None}
    assert storage(run_checks(named, str(node)))["filesystem.mounted"].status == "pass"


def test_a_bind_mount_of_the_owners_is_known_by_its_name(node: Path) -> None:
    mounted(node, lambda text: text + "300 27 254:0 /srv/data /data rw - ext4 /dev/vda rw\n")
    volume = describe_volume("/data", str(node))
    named = {**BUILT, "array": None, "filesystem": volume, "memory": NOTHING, "offload_dir": None}
    assert manifests.validate(named) == []
    assert storage(run_checks(named, str(node)))["filesystem.mounted"].status == "pass"
    mounted(node, lambda text: text.replace("254:0 /srv/data ", "254:0 /srv "))
    check = storage(run_checks(named, str(node)))["filesystem.mounted"]
    assert (check.status, check.found) == ("fail", "ext4 from `/dev/vda`, its directory `/srv`, not `/srv/data`")
    assert "unmount what hides `/data`" in check.remedy
    # An earlier version noted no directory.
    del volume["root"]
    assert storage(run_checks(named, str(node)))["filesystem.mounted"].status == "pass"


@pytest.mark.parametrize("point", ["/srv", "srv/system", "/nowhere"])
def test_a_directory_that_is_no_mount_point_is_refused(node: Path, point: str) -> None:
    with pytest.raises(Refusal, match="`tunetool_volume`: nothing is mounted at"):
        describe_volume(point, str(node))


def test_no_role_takes_it_for_a_volume_that_was_built(
    tmp_path: Path, named: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "node.json")
    manifests.write(named, path)
    assert built_manifest(path) is None
    assert known_manifest(path) == named
    monkeypatch.setattr(facts, "load", lambda: named)
    monkeypatch.setattr(facts, "read_drives", list)
    monkeypatch.setattr(facts, "read_arrays", list)
    monkeypatch.setattr(facts, "examine", lambda names: {})
    assert facts.look()[0].manifest is None


def test_the_manifest_of_a_built_array_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ansible", reason="Ansible's control side needs Python 3.11")
    monkeypatch.setattr(sys, "path", [str(ROOT / ".ansible/collections"), *sys.path])
    module = importlib.import_module("ansible_collections.tunetool.node.plugins.modules.node_manifest")
    wanted = {"volume": POINT, **dict.fromkeys(("array", "members", "filesystem", "memory", "volumes"))}
    monkeypatch.setattr(module, "describe_volume", lambda point: {"mount_point": point})
    monkeypatch.setattr(module, "built_manifest", lambda: BUILT)
    with pytest.raises(module.Refusal, match="was built on this node"):
        module.storage_of(wanted)
    monkeypatch.setattr(module, "built_manifest", lambda: None)
    assert module.storage_of(wanted) == {"array": None, "filesystem": {"mount_point": POINT}}
    with pytest.raises(module.Refusal, match="neither"):
        module.storage_of({**wanted, "volume": ""})
