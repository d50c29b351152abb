"""A machine that cannot be a control machine: said at once, in one line and a hint, by `make setup` and every command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hosts_commands import ON_HOSTS, with_inventory
from tunetool.cli.main import cli
from tunetool.fleet import playbook
from waiting import PATIENCE

ROOT = Path(__file__).parents[2]


def tunetool(*arguments: str, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; from tunetool.cli.main import main; sys.argv[0] = 'tunetool'; {before}main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def error_and_hint(done: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    assert done.stdout == ""
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    return error, hint


def test_every_command_with_an_inventory_is_tried_here() -> None:
    assert {path for path, _ in with_inventory(cli)} == set(ON_HOSTS)


@pytest.mark.parametrize("path", ON_HOSTS, ids=" ".join)
def test_a_command_for_hosts_names_the_missing_ansible_before_anything_else(
    path: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "ansible_runner.py").write_text("raise ImportError('none')")
    inventory = tmp_path / "hosts"
    inventory.write_text("node1\n")
    run = ["--runs-dir", str(tmp_path / "runs")] if path[0] in ("verify", "bench") else []
    search = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = tunetool(*path, "-i", str(inventory), *ON_HOSTS[path], *run, PYTHONPATH=search)
    assert done.returncode == 2, done.stderr
    error, hint = error_and_hint(done)
    assert error.startswith("error: `-i` needs Ansible, ")
    assert "make setup" in hint
    assert not (tmp_path / "runs").exists()


def test_an_old_python_is_the_reason_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playbook, "_OLDEST", (99, 0))
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(playbook.UsageProblem, match=f"needs Python 3.11 or newer .* tunetool runs on {own}") as caught:
        playbook.need_ansible()
    assert "PYTHON=" in str(caught.value.hint)


@pytest.mark.parametrize("arguments", [["verify"], ["inspect", "-i", "hosts"], ["provision", "-i", "hosts"]])
def test_a_machine_that_is_not_linux_is_named(arguments: list[str]) -> None:
    done = tunetool(*arguments, before="sys.platform = 'darwin'; ")
    assert done.returncode == 3
    error, hint = error_and_hint(done)
    assert error == "error: tunetool needs Linux, and this is `darwin`"
    assert "control machine with Linux" in hint
    for always in ("--help", "--version"):
        assert tunetool(always, before="sys.platform = 'darwin'; ").returncode == 0


# --- make setup ---------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout on a machine whose package client and interpreter only note that they were called."""
    (tmp_path / "tools/dev").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    for name in ("tools/dev/setup.sh", "Makefile"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tests/programs.txt").write_text("gone gone-package setup\n")
    (tmp_path / "bin").mkdir()
    program(tmp_path, "apt-get", f"touch {tmp_path}/asked; exit 1")
    return tmp_path


def program(checkout: Path, name: str, script: str) -> None:
    (checkout / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
    (checkout / "bin" / name).chmod(0o755)


def set_up(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "MAKEFLAGS", "MAKELEVEL")}
    return subprocess.run(
        ["bash", str(checkout / "tools/dev/setup.sh")],
        env={**kept, "PATH": f"{checkout / 'bin'}:/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_set_up_names_a_machine_that_is_not_linux(checkout: Path) -> None:
    program(checkout, "uname", "echo Darwin")
    done = set_up(checkout)
    assert done.returncode == 2
    error, hint = error_and_hint(done)
    assert error == "error: this is Darwin, and tunetool needs a control machine with Linux"
    assert "Linux machine" in hint
    assert not (checkout / "asked").exists()


OLD = """
case "$1" in
--version) echo Python 3.10.12;;
-c) exit 1;;
*) echo "$@" >> "$0.called";;
esac
"""


@pytest.mark.parametrize("chosen", ["python3", "python3.10", "./.venv/bin/python"])
def test_set_up_names_a_python_without_ansible(checkout: Path, chosen: str) -> None:
    (checkout / ".venv/bin").mkdir(parents=True)
    program(checkout, chosen.replace("./", "../"), OLD)
    environment = {} if chosen.startswith("./") else {"PYTHON": chosen}
    done = set_up(checkout, **environment)
    assert done.returncode == 2
    error, hint = error_and_hint(done)
    assert error == f"error: `{chosen.removeprefix('./')}` is Python 3.10.12, and Ansible needs Python 3.11 or newer"
    assert ("remove .venv" in hint) == chosen.startswith("./")
    assert "PYTHON=python3.11 make setup" in hint
    assert not (checkout / "asked").exists()
    assert not (checkout / "bin" / f"{chosen}.called").exists()
