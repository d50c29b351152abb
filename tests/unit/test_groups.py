"""The commands of a group of tests: after a clone of the same files has passed, only the tests that it skipped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest

pytest.importorskip("tomllib", reason="tools/dev needs Python 3.11")
import environments
import groups
import steps

WHOLE = "tests/unit"


@pytest.fixture
def skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(groups, "SKIPPED_IN_FRESH", tmp_path / "skipped")
    return tmp_path / "skipped"


def test_all_unit_tests_run_where_no_clone_passed() -> None:
    assert WHOLE in groups.commands_of("unit", slow=False, pythons=False)[0]
    assert len(groups.commands_of("lint", slow=False, pythons=False)) > 5


def test_ansible_lint_runs_until_it_passes_and_after_a_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(groups, "ROOT", tmp_path)
    monkeypatch.setattr(groups, "VENV", tmp_path / ".venv/bin")
    for name in (".venv/bin/ansible-lint", "roles/one/tasks/main.yml", "constraints.txt", "ansible.cfg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    program, runs = tmp_path / ".venv/bin/ansible-lint", tmp_path / "runs"
    program.chmod(0o755)

    def lint(code: int) -> tuple[int, int]:
        """The exit status, and how often it ran."""
        program.write_text(f"#!/bin/sh\necho run >>{runs}\nexit {code}\n")
        status = subprocess.run(groups.ansible_lint(), check=False).returncode
        return status, len(runs.read_text().splitlines())

    assert [lint(2), lint(0), lint(2)] == [(2, 1), (0, 2), (0, 2)]
    (tmp_path / "roles/one/tasks/main.yml").write_text("- name: more\n")
    assert [lint(2), lint(0)] == [(2, 3), (0, 4)]
    (tmp_path / "roles/two.yml").touch()
    assert lint(2) == (2, 5)


def test_after_a_clone_passed_those_run_that_it_skipped(skipped: Path) -> None:
    skipped.write_text("tests/unit/test_a.py::test_one[a b]\ntests/unit/test_b.py\n")
    assert groups.commands_of("lint", slow=False, pythons=False, fresh_passed=True) == []
    first, *others = groups.commands_of("unit", slow=False, pythons=False, fresh_passed=True)
    assert {"tests/unit/test_a.py::test_one[a b]", "tests/unit/test_b.py"} < set(first)
    assert not any(WHOLE in command for command in (first, *others))


def test_where_slow_tests_are_wanted_all_run_here(skipped: Path) -> None:
    skipped.write_text("")
    commands = groups.commands_of("unit", slow=True, pythons=False, fresh_passed=True)
    assert [WHOLE in command for command in commands].count(True) == 1
    assert not any("not slow" in command for command in commands)


def test_what_measures_the_disk_comes_last() -> None:
    everything = ["lint", "unit", "fresh", "containers", "measurement", "checkpoint", "node"]
    assert groups.rows(everything, fresh_first=True) == [
        ["containers", "fresh", "lint", "unit"],
        ["node"],
        ["checkpoint", "measurement"],
    ]
    assert groups.rows(everything, fresh_first=False)[0] == ["containers", "lint", "unit", "fresh"]
    assert sorted(group for row in groups.rows(everything, fresh_first=False) for group in row) == sorted(everything)
    assert groups.rows(["unit", "lint"], fresh_first=False) == [["unit", "lint"]]
    assert groups.rows(["node"], fresh_first=False) == [["node"]]


def outcome(group: str, *codes: int) -> steps.Outcome:
    return steps.Outcome(group, 1.0, 2.0, "FAILED" if any(codes) else "passed")


def test_rows_run_at_the_same_time_and_every_group_runs(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Each of two commands waits for the other, so one after another they would never end."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    scripts = {
        "node": f"echo there > {fifo}; echo met",
        "tune": f"cat {fifo}; printf met; exit 3",
        "checkpoint": "echo after",
    }

    async def run_one(group: str) -> steps.Outcome:
        return outcome(group, await steps.run(["bash", "-c", scripts[group]], 60, steps.named(group, deque())))

    outcomes = asyncio.run(steps.in_rows([["node"], ["tune", "checkpoint"]], run_one))
    assert [(each.name, each.status) for each in outcomes] == [
        ("node", "passed"),
        ("tune", "FAILED"),
        ("checkpoint", "passed"),
    ]
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == sorted(
        ["node        | met", "tune        | there", "tune        | met", "checkpoint  | after"]
    )


def test_what_ends_one_row_ends_the_other(tmp_path: Path) -> None:
    runs = []

    async def run_one(group: str) -> steps.Outcome:
        runs.append(group)
        if group == "containers":
            end = f"trap 'echo ended > {tmp_path}/ended; exit' TERM; echo > {tmp_path}/started; sleep 3600 & wait"
            await steps.run(["bash", "-c", end], 3600)
        while not (tmp_path / "started").exists():
            await asyncio.sleep(0.05)
        raise OSError("no disk")

    with pytest.RaisesGroup(OSError):
        asyncio.run(steps.in_rows([["tune"], ["containers", "node"]], run_one))
    assert (sorted(runs), (tmp_path / "ended").read_text()) == (["containers", "tune"], "ended\n")


def test_sigterm_ends_what_runs(tmp_path: Path) -> None:
    end = f"trap 'echo ended > {tmp_path}/ended; exit' TERM; kill -TERM {os.getpid()}; sleep 3600 & wait"
    assert steps.finish(steps.run(["bash", "-c", end], 3600)) == 143
    assert (tmp_path / "ended").read_text() == "ended\n"


def test_what_a_command_leaves_behind_holds_nobody_up() -> None:
    lines: list[str] = []
    assert asyncio.run(steps.run(["bash", "-c", "sleep 60 & echo $!"], 50, lines.append)) == 0
    os.kill(int(lines[0]), signal.SIGTERM)


def test_a_tool_that_is_stopped_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def lint(*commands: list[str], seconds: float) -> str:
        monkeypatch.setattr(groups, "lint_commands", lambda: list(commands))
        return asyncio.run(groups.run_group("lint", seconds, slow=False, pythons=False, fresh_passed=False)).status

    assert lint(["sleep", "600"], ["echo", "checked"], seconds=0.5) == "stopped  over its box"
    assert lint(["echo", "after"], seconds=60) == "passed"
    assert {"checked", "after"} <= set(capfd.readouterr().out.splitlines())


def test_what_failed_is_said_again_at_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By pytest as it is: a false assertion, an error before a test, and a test that hangs."""
    (tmp_path / "test_it.py").write_text(
        "import time, pytest\n"
        "@pytest.fixture\ndef broken(): raise OSError('no disk')\n"
        "def test_wrong(): assert 1 + 1 == 3\n"
        "def test_error(broken): ...\n"
        "@pytest.mark.timeout(0.1)\ndef test_hangs(): time.sleep(600)\n"
        "def test_right(): ...\n"
    )
    command = groups.pytest(
        "-ra", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)
    )
    why = deque[str](maxlen=steps.LINES_OF_WHY)
    assert asyncio.run(steps.run([sys.executable, *command[1:]], 600, steps.named("tune", why))) == 1
    said = "\n".join(why)
    assert "E   assert (1 + 1) == 3" in said
    assert "E   OSError: no disk" in said
    assert "E   Failed: Timeout (>0.1s)" in said
    assert "test_it.py::test_hangs" in said
    assert "test_right" not in said
    assert "test_it.py::test_wrong" in capfd.readouterr().out


def test_a_clone_that_did_not_write_its_list_is_a_fault(skipped: Path) -> None:
    with pytest.raises(FileNotFoundError):
        groups.commands_of("unit", slow=False, pythons=False, fresh_passed=True)


def test_of_a_versions_environments_the_locks_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    others = [tmp_path / f"tunetool/pythons/{version}-{0:012}" for version in ("3.10", "3.12")]
    for folder in others:
        (folder / "lib").mkdir(parents=True)
    made: list[Path] = []

    def make(directory: Path) -> None:
        made.append(directory)
        directory.mkdir()
        if len(made) == 1:
            raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"), environments.kept("pythons", b"a lock", make, "3.10-"):
        pass
    # What is half made is made again, what is whole is not.
    for _ in range(2):
        with environments.kept("pythons", b"a lock", make, "3.10-") as directory:
            assert made == [directory, directory]
    assert [folder.exists() for folder in others] == [False, True]
