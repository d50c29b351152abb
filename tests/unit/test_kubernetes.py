"""The node's condition in Kubernetes: what node-problem-detector starts, reads and may do.

No registry that tests reach has its binary, so the configuration is held against its documented contract
(docs/custom_plugin_monitor.md and pkg/custompluginmonitor of kubernetes/node-problem-detector): it starts the path, takes
exit code 0 for False, 1 for True and any other for Unknown, and shows 80 bytes of the output by default.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tunetool.health.results import Files, Health, Result, answered, in_a_line, keep, publish
from tunetool.node.health.settings import LINE_PATH, dump

FOLDER = Path(__file__).parents[2] / "docs/kubernetes"
SCRIPT = FOLDER / "scratch-unhealthy.sh"
CONFIG: dict[str, Any] = json.loads((FOLDER / "scratch-unhealthy.json").read_text())
OBJECTS: dict[str, Any] = {
    each["kind"]: each for each in yaml.safe_load_all((FOLDER / "daemonset.yaml").read_text()) if each
}
POD: dict[str, Any] = OBJECTS["DaemonSet"]["spec"]["template"]["spec"]
WELL, SICK, UNKNOWN = 0, 1, 2

SHELLS = [name for name in ("sh", "bash", "dash") if shutil.which(name)]


def said(path: Path, shell: str = "sh") -> tuple[int, str]:
    """The exit code and the line, as node-problem-detector sees them."""
    done = subprocess.run([shell, SCRIPT, path], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    assert 0 < len(done.stdout.strip().encode()) <= CONFIG["pluginConfig"]["max_output_length"]
    return done.returncode, done.stdout.strip()


def node(root: Path, result: Result | None, measured: Result | None = None, period: int = 900) -> Files:
    """A node whose health check has published these results."""
    files = Files(root)
    files.settings.parent.mkdir(parents=True, exist_ok=True)
    files.settings.write_text(dump(period, 3600, "", []))
    files.manifest.touch()
    if result is not None:
        keep(files.checked, result)
    if measured is not None:
        keep(files.measured, measured)
    publish(files)
    return files


LONG = 'array.members: 7 of 8 members; missing `S7XYNG0T900123`, which is `$(reboot)` \\ "é"'


@pytest.mark.parametrize("shell", SHELLS)
def test_the_condition_is_what_the_check_found(tmp_path: Path, shell: str) -> None:
    now = time.time()
    for number, (result, measured, expected) in enumerate(
        [
            (Result(now, "pass"), None, (WELL, "every check passes")),
            (Result(now, "fail", ["a.b: broken"]), None, (SICK, "a.b: broken")),
            (Result(now, "fail", [LONG, "c"]), None, (SICK, in_a_line([LONG, "c"], 80))),
            (Result(now, "pass"), Result(now + 9, "fail", ["read: slow"]), (SICK, "read: slow")),
            (Result(now, "unproven", (), ["a.b: dark"]), None, (UNKNOWN, "a.b: dark")),
            (None, None, (UNKNOWN, "the last result of tunetool's health check is not recent")),
        ]
    ):
        assert said(node(tmp_path / str(number), result, measured).line, shell) == expected


@pytest.mark.parametrize("status", ["pass", "fail"])
@pytest.mark.parametrize(("age", "recent"), [(0, True), (1700, True), (1810, False), (90_000, False), (-600, False)])
def test_a_stale_result_is_never_healthy(tmp_path: Path, status: str, age: int, recent: bool) -> None:
    """Two periods; and a clock that was set back."""
    files = node(tmp_path, Result(time.time() - age, status, ["a: b"] if status == "fail" else ()))
    code, words = said(files.line)
    assert (code != UNKNOWN) is recent
    assert recent or "not recent" in words
    assert not (code == WELL and status == "fail")


@pytest.mark.parametrize(
    "text", [None, "", "\n", "pass", "pass\n", "pass 0\n", "pass x y z\n", "pass 0 9999999999", "0 9999999999 pass\n"]
)
def test_a_file_that_is_no_result_is_unknown(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "health.line"
    if text is not None:
        path.write_text(text)
    assert said(path)[0] == UNKNOWN


def test_settings_that_are_gone_leave_nothing_known(tmp_path: Path) -> None:
    files = node(tmp_path, Result(time.time(), "pass"))
    files.settings.unlink()
    publish(files)
    assert said(files.line)[0] == UNKNOWN
    assert answered(files).status == "unknown"


@given(st.lists(st.text(max_size=200), max_size=3))
def test_any_words_fit_into_the_line(reasons: list[str]) -> None:
    words = in_a_line(Health("fail", reasons).reasons, 80)
    assert len(words.encode()) <= 80
    assert words.isprintable()


def test_every_user_may_read_the_line(tmp_path: Path) -> None:
    files = node(tmp_path, Result(time.time(), "pass"))
    assert files.line.stat().st_mode & 0o777 == 0o644
    assert files.line.parent.stat().st_mode & 0o777 == 0o755
    assert files.line == tmp_path / LINE_PATH[1:]


def test_the_configuration_keeps_the_contract() -> None:
    """Names and rules as types/config.go of pkg/custompluginmonitor validates them."""
    assert CONFIG["plugin"] == "custom"
    assert set(CONFIG) == {"plugin", "pluginConfig", "source", "metricsReporting", "conditions", "rules"}
    assert set(CONFIG["pluginConfig"]) <= {
        "invoke_interval",
        "timeout",
        "max_output_length",
        "concurrency",
        "enable_message_change_based_condition_update",
        "skip_initial_status",
    }
    (condition,), (rule,) = CONFIG["conditions"], CONFIG["rules"]
    assert condition["type"] == rule["condition"] == "ScratchUnhealthy"
    assert rule["type"] == "permanent"
    # With it the status is Unknown too, where the message alone says why.
    assert "ealthy" not in condition["reason"]


def test_the_daemonset_has_the_files_that_it_names() -> None:
    (container,) = POD["containers"]
    mounts = {each["name"]: each for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in POD["volumes"]}
    generated = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    (made,) = generated["configMapGenerator"]
    assert volumes["condition"]["configMap"] == {"name": made["name"], "defaultMode": 0o555}
    there = {f"{mounts['condition']['mountPath']}/{name}" for name in made["files"]}
    assert all((FOLDER / name).is_file() for name in (*made["files"], *generated["resources"]))
    given = dict(word.split("=") for word in container["command"] if "=" in word)
    assert {given["--config.custom-plugin-monitor"], CONFIG["rules"][0]["path"]} == there
    assert mounts["result"]["mountPath"] == volumes["result"]["hostPath"]["path"] == str(Path(LINE_PATH).parent)
    account = OBJECTS["ServiceAccount"]["metadata"]["name"]
    assert POD["serviceAccountName"] == account == OBJECTS["ClusterRoleBinding"]["subjects"][0]["name"]
    assert OBJECTS["ClusterRoleBinding"]["subjects"][0]["namespace"] == generated["namespace"]


def test_the_daemonset_may_read_the_result_and_no_more() -> None:
    (container,) = POD["containers"]
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(POD)
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["securityContext"]["runAsUser"] > 0
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert all(mount["readOnly"] for mount in container["volumeMounts"])
    assert [each["hostPath"] for each in POD["volumes"] if "hostPath" in each] == [
        {"path": "/run/tunetool", "type": "Directory"}
    ]
