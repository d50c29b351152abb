"""The command line on a node: from an inventory's variables and a caller's arguments, through Ansible."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tunetool.fleet.playbook import Run, find_playbook
from tunetool.fleet.playbook import play as run_play
from tunetool.node.play.tunetool_command import Refused, changed, command_line

_PROGRAM = f"""#!{sys.executable}
import json, os, sys
record = {{"verdict": {{"status": "fail", "reasons": ["slow"]}}, "argv": sys.argv[1:], "mark": os.environ.get("TUNETOOL_PLAY")}}
print(json.dumps(record))
sys.exit(1)
"""


def test_what_is_empty_is_left_out_and_lists_repeat() -> None:
    options = {"target": "", "expect": ["read=1GBps", "write=1GBps"], "allow_busy": True, "python": None, "gds": False}
    assert command_line(["verify"], options, ["--level", "full"]) == [
        *("verify", "--json", "-"),
        *("--expect", "read=1GBps", "--expect", "write=1GBps", "--allow-busy"),
        *("--level", "full"),
    ]


@pytest.mark.parametrize("given", [["--runs-dir", "/b"], ["--runs-dir=/b"]])
def test_arguments_come_before_options(given: list[str]) -> None:
    assert command_line(["verify"], {"runs_dir": "/a"}, given) == ["verify", "--json", "-", *given]
    # After `--` it is not an option.
    behind = ["--", "/source", "--runs-dir"]
    assert "/a" in command_line(["stage"], {"runs_dir": "/a"}, behind)


def test_check_mode_measures_nothing() -> None:
    argv = command_line(
        ["verify"], {"require": ["deepspeed"], "target": "/x"}, ["--level=full", "--gds", "require", "-i"], True
    )
    assert argv == ["verify", "--json", "-", "--target", "/x", "--level", "config", "-i"]


@pytest.mark.parametrize("command", [[], ["provision"], ["lab", "up"], ["--debug", "verify"], ["sh", "-c", "true"]])
def test_only_what_makes_a_record_is_run(command: list[str]) -> None:
    with pytest.raises(Refused, match="hint: one of verify, accept, stage, bench, tune"):
        command_line(command, {}, [])


@pytest.mark.parametrize(("options", "arguments"), [({"json": "/etc/passwd"}, []), ({}, ["--json=/etc/passwd"])])
def test_the_record_goes_to_the_caller_alone(options: dict[str, str], arguments: list[str]) -> None:
    with pytest.raises(Refused, match="`--json`"):
        command_line(["verify"], options, arguments)


def test_only_a_copy_made_or_removed_is_a_change() -> None:
    assert not changed({"measurements": [{"name": "verify.seq.read"}], "checks": []})
    assert changed({"measurements": [{"name": "stage.copy"}]})
    assert changed({"checks": [{"id": "stage.evicted"}]})


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    pytest.importorskip("ansible_runner", reason="Ansible's control side needs Python 3.11")
    program = tmp_path / "prefix/bin/tunetool"
    program.parent.mkdir(parents=True)
    program.write_text(_PROGRAM)
    program.chmod(0o755)
    path = tmp_path / "hosts.yml"
    path.write_text(
        f"all:\n  vars: {{ansible_connection: local, ansible_python_interpreter: {sys.executable}, "
        f"ansible_become: false, tunetool_prefix: {program.parent.parent}}}\n"
        "  hosts:\n    n1: {verify_gds: off, verify_target: /mnt/one, verify_expect: [read=1GBps], stage_threads: 3}\n"
    )
    return path


def play(
    inventory: Path, playbook: str, variables: dict[str, Any], check: bool = False
) -> tuple[int, str, dict[str, Any]]:
    """Exit status, the last event and the module's result."""
    events: list[tuple[str, dict[str, Any]]] = []

    def remember(kind: str, data: Mapping[str, Any]) -> None:
        if kind in ("runner_on_ok", "runner_on_failed", "runner_on_skipped", "runner_on_unreachable"):
            events.append((kind, dict(data.get("res") or {})))

    run = Run(find_playbook(playbook), inventory, None, 1, variables, check)
    code = run_play(run, remember, lambda: None)
    assert len(events) == 1
    return (code, *events[0])


def test_an_inventorys_variables_reach_the_node_or_the_callers(inventory: Path) -> None:
    code, event, result = play(inventory, "verify", {"verify_tolerance": "2%"})
    assert (code, event, result["msg"]) == (2, "runner_on_failed", "FAIL: slow")
    # A bare `off` in YAML is false.
    assert result["record"]["argv"] == [
        *("verify", "--json", "-", "--expect", "read=1GBps", "--target", "/mnt/one", "--gds", "off"),
        *("--level", "quick", "--duration", "4s", "--tolerance", "2%"),
    ]
    arguments = ["--target", "/mnt/two", "--expect=write=2GBps", "--level", "full"]
    code, event, result = play(inventory, "verify", {"run_tunetool_arguments": arguments, "run_tunetool_judge": False})
    assert (code, event, result["rc"], result["changed"]) == (0, "runner_on_ok", 1, False)
    assert result["record"]["argv"] == ["verify", "--json", "-", "--gds", "off", *arguments]
    assert result["record"]["mark"] is None


def test_check_mode_makes_the_checks_and_skips_the_rest(inventory: Path) -> None:
    code, event, result = play(inventory, "verify", {"verify_judge": False}, check=True)
    assert (code, event, result["changed"]) == (0, "runner_on_ok", False)
    argv = result["record"]["argv"]
    assert argv[argv.index("--level") + 1] == "config"
    assert "--gds" not in argv
    code, event, _ = play(inventory, "stage", {"stage_source": "/a", "stage_destination": "/b"}, check=True)
    assert (code, event) == (0, "runner_on_skipped")


@pytest.mark.parametrize(
    ("variables", "argv"),
    [
        ({"stage_source": "-a"}, ["stage", "copy", "--json", "-", "--threads", "3", "--", "-a", "/b"]),
        (
            {"stage_source": "/a", "stage_replace": True, "stage_wait": False, "stage_checksum": "sha256"},
            [
                "stage",
                "copy",
                "--json",
                "-",
                "--checksum",
                "sha256",
                "--threads",
                "3",
                "--no-wait",
                "--replace",
                "--",
                "/a",
                "/b",
            ],
        ),
        (
            {"stage_action": "evict", "stage_checksum": "sha256", "stage_replace": True, "stage_threads": 0},
            ["stage", "evict", "--json", "-", "--", "/b"],
        ),
    ],
    ids=["dash", "all", "evict"],
)
def test_staging_by_a_playbook_s_variables(inventory: Path, variables: dict[str, Any], argv: list[str]) -> None:
    variables |= {"stage_destination": "/b", "stage_become": False, "stage_judge": False}
    assert play(inventory, "stage", variables)[2]["record"]["argv"] == argv
