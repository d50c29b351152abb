"""Owner, group and mode of the offload directory, from the role's variables to the manifest."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from machines import RECORDED
from tunetool.node.common import manifest as manifests
from tunetool.node.volume.offload_access import access_of, asked, in_words

BUILT: dict[str, Any] = json.loads((RECORDED / "built-manifest.json").read_text())
COLLECTION = Path(__file__).parents[2] / ".ansible/collections"
WANTED = {"offload_owner": "root", "offload_group": "root", "offload_mode": "777"}
NOTED = {"uid": 0, "gid": 0, "mode": "0777"}


def test_what_is_asked_for_and_what_is_there_have_one_form(tmp_path: Path) -> None:
    tmp_path.chmod(0o1770)
    assert access_of(tmp_path.stat()) == {"uid": os.getuid(), "gid": tmp_path.stat().st_gid, "mode": "1770"}
    assert asked(WANTED) == NOTED
    assert in_words(NOTED) == "root:root 0777"
    assert in_words({"uid": 424242, "gid": 424243, "mode": "1777"}) == "424242:424243 1777"
    with pytest.raises(KeyError):
        asked({**WANTED, "offload_owner": "nobody-has-this"})


@pytest.mark.parametrize(
    ("directory", "offload", "noted"),
    [("/mnt/x/offload", NOTED, NOTED), ("/mnt/x/offload", {}, None), ("", NOTED, None)],
    ids=["noted", "of an owner that is not there yet", "no directory"],
)
def test_the_manifest_notes_it(
    directory: str,
    offload: dict[str, Any],
    noted: dict[str, Any] | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    testing = pytest.importorskip("ansible.module_utils.testing", reason="Ansible's control side needs Python 3.11")
    monkeypatch.syspath_prepend(str(COLLECTION))
    module = importlib.import_module("ansible_collections.tunetool.node.plugins.modules.node_manifest")
    frame = importlib.import_module("ansible_collections.tunetool.node.plugins.module_utils.play.convergence")
    monkeypatch.setattr(frame, "only_one", contextlib.nullcontext)
    arguments = {
        "_ansible_check_mode": True,
        "settings": {"profile": "lab"},
        "array": {key: value for key, value in BUILT["array"].items() if key != "members"},
        "members": BUILT["array"]["members"],
        "filesystem": BUILT["filesystem"],
        "memory": BUILT["memory"],
        "offload_dir": directory,
        "offload": offload,
        "tool_version": "0.1.0",
    }
    with testing.patch_module_args(arguments), pytest.raises(SystemExit):
        module.main()
    document = json.loads(json.loads(capsys.readouterr().out)["diff"]["after"])
    assert document.get("offload") == noted
    assert manifests.validate(document) == []


def test_the_module_says_of_the_directory_what_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ansible", reason="Ansible's control side needs Python 3.11")
    monkeypatch.syspath_prepend(str(COLLECTION))
    module = importlib.import_module("ansible_collections.tunetool.node.plugins.modules.scratch_filesystem")
    assert module.access(WANTED) == NOTED
    assert module.access({**WANTED, "offload_group": "nobody-has-this"}) == {}
    returned = "scratch_filesystem_result.offload"
    assert returned + " " in (Path(__file__).parents[2] / "roles/tunetool/tasks/main.yml").read_text()
