"""A machine that cannot be a control machine: said at once, in one line and a hint, by `make setup` and every command."""

from __future__ import annotations

import ast
import os
import re
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
def test_a_command_for_hosts_names_the_missing_ansible_first(path: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "ansible_runner.py").write_text("raise ImportError('none')")
    inventory = tmp_path / "hosts"
    inventory.write_text("node1\n")
    run = ["--runs-dir", str(tmp_path / "runs")] if path[0] in ("verify", "accept", "bench") else []
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


def test_the_extra_control_has_all_that_is_imported() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    listed = "".join(re.findall(r"^(?:dependencies|control) = \[\n(.*?)^\]$", project, re.MULTILINE | re.DOTALL))
    names = set(re.findall(r'^  "([\w-]+)', listed, re.MULTILINE))
    assert names == {"click", "jinja2", "pydantic", "rich", "tomli", "xxhash", "ansible-core", "ansible-runner", "pip"}
    modules = {"click", "jinja2", "pydantic", "rich", "tomli", "xxhash", "ansible", "ansible_runner", "tunetool"}
    sources = [
        *(ROOT / "tools/tunetool/fleet").glob("*.py"),
        *(
            path
            for name in ("action", "filter", "lookup", "plugin_utils")
            for path in ROOT.glob(f"plugins/{name}/*.py")
        ),
        *(ROOT / f"plugins/modules/{name}.py" for name in ("wheelhouse", "write_plan", "validate_variables")),
        ROOT / "plugins/module_utils/common/node_wheel.py",
    ]
    assert len(sources) > 15
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            imported = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            imported += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            for name in (each.partition(".")[0] for each in imported):
                assert name in modules or name in sys.stdlib_module_names, f"{source}: {name}"


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
    # It may be a link to the machine's.
    (checkout / "bin" / name).unlink(missing_ok=True)
    (checkout / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
    (checkout / "bin" / name).chmod(0o755)


def set_up(checkout: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "MAKEFLAGS", "MAKELEVEL")}
    return subprocess.run(
        [shutil.which("bash") or "bash", str(checkout / "tools/dev/setup.sh"), *options],
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


PYTHON = """
version={version}
case "$*" in
--version) echo Python $version.9;;
*"version_info < (3, 11)"*) [ ${{version#3.}} -ge 11 ];;
*"import ensurepip"*) {ensurepip};;
*"version_info[:2]"*) echo $version;;
"-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python;;
*"-m pip"*) echo "$@" >> installed;;
*sysconfig*) echo packages;;
*"-m compileall"*) ;;
*) exit 9;;
esac
"""
RELEASES = {
    "debian 12": 'ID=debian\nVERSION_ID="12"\n',
    "debian 11": 'ID=debian\nVERSION_ID="11"\n',
    "ubuntu 22.04": 'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="22.04"\n',
    "rocky 9": 'ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.4"\n',
    "arch": "ID=arch\n",
}


def machine(checkout: Path, release: str, pythons: dict[str, str], ensurepip: bool = True) -> dict[str, str]:
    """The checkout on a machine with that os-release, these Pythons and no other. Returns variables for ``set_up``."""
    (checkout / "os-release").write_text(RELEASES[release])
    for name in ("bash", "cat", "cut", "dirname", "env", "id", "ln", "mkdir", "sha256sum", "uname", "cp", "sh"):
        (checkout / "bin" / name).symlink_to(shutil.which(name) or name)
    for name, version in pythons.items():
        program(checkout, name, PYTHON.format(version=version, ensurepip="true" if ensurepip else "false"))
    for name in ("pyproject.toml", "constraints.txt"):
        (checkout / name).touch()
    return {"PATH": str(checkout / "bin"), "TUNETOOL_OS_RELEASE": str(checkout / "os-release")}


@pytest.mark.parametrize("release", [name for name in RELEASES if name != "debian 11"])
@pytest.mark.parametrize("pythons", [{"python3": "3.12"}, {"python3": "3.9", "python3.11": "3.11"}])
def test_a_control_machine_is_set_up_without_a_package_or_root(
    checkout: Path, release: str, pythons: dict[str, str]
) -> None:
    variables = machine(checkout, release, pythons)
    program(checkout, "sudo", f"touch {checkout}/asked")
    done = set_up(checkout, **variables)
    assert done.returncode == 0, done.stderr
    (line,) = (checkout / "installed").read_text().splitlines()
    assert line.endswith("--constraint constraints.txt --no-compile --editable .[control]")
    assert "tunetool doctor" in done.stdout
    assert (checkout / ".ansible/collections/ansible_collections/tunetool/node").is_symlink()
    assert not (checkout / "asked").exists()
    # A second call has nothing to do.
    again = set_up(checkout, **variables)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert len((checkout / "installed").read_text().splitlines()) == 1


def test_tests_get_more_and_a_later_set_up_takes_nothing_away(checkout: Path) -> None:
    variables = machine(checkout, "debian 12", {"python3": "3.11"})
    (checkout / "tests/programs.txt").write_text("python3 python3 setup\n")
    for options in ((), ("--for", "lint"), (), ("--for", "unit")):
        assert set_up(checkout, *options, **variables).returncode == 0
    extras = [line.rpartition(" ")[2] for line in (checkout / "installed").read_text().splitlines()]
    assert extras == [".[control]", ".[control,dev]"]
    (checkout / "constraints.txt").write_text("click==8.1\n")
    assert set_up(checkout, **variables).returncode == 0
    assert (checkout / "installed").read_text().splitlines()[2].endswith(".[control]")


def test_the_site_gets_its_builder_in_a_fresh_clone(checkout: Path) -> None:
    variables = machine(checkout, "debian 12", {"python3": "3.11"})
    (checkout / "tests/programs.txt").write_text("python3 python3 setup\n")
    make = shutil.which("make") or "make"
    subprocess.run([make, "-C", str(checkout), "docs", "SHELL=bash"], env=variables, capture_output=True, check=False)
    (extras,) = [line.rpartition(" ")[2] for line in (checkout / "installed").read_text().splitlines()]
    project = (ROOT / "pyproject.toml").read_text()
    (builder,) = re.findall(r"^docs = (.*)$", project, re.MULTILINE)
    (dev,) = re.findall(r"^dev = \[\n(.*?)^\]$", project, re.MULTILINE | re.DOTALL)
    assert "zensical" in builder
    assert "tunetool[docs]" in dev
    assert {"docs", "dev"} & set(extras.strip(".[]").split(","))


@pytest.mark.parametrize(
    ("release", "line"),
    [
        ("debian 12", "apt-get install python3.11-venv"),
        ("ubuntu 22.04", "apt-get install python3.11-venv"),
        ("debian 11", "this release has no package of it; the next one has"),
        ("rocky 9", "dnf install python3.11"),
        (
            "arch",
            "install Python 3.11 or newer, with its modules venv and ensurepip, by this machine's package manager",
        ),
    ],
)
def test_set_up_names_the_package_of_a_newer_python(checkout: Path, release: str, line: str) -> None:
    variables = machine(checkout, release, {"python3": "3.10"})
    program(checkout, "id", "echo 1000")
    done = set_up(checkout, **variables)
    assert done.returncode == 2
    error, hint = error_and_hint(done)
    assert error == "error: `python3` is Python 3.10.9, and Ansible needs Python 3.11 or newer"
    sudo = "sudo " if line.startswith(("apt-get", "dnf")) else ""
    assert hint.endswith(f"PYTHON=python3.11 make setup; where there is none: {sudo}{line}")
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(("release", "line"), [("ubuntu 22.04", "python3.12-venv"), ("rocky 9", "python3.12")])
def test_set_up_names_the_package_of_ensurepip(checkout: Path, release: str, line: str) -> None:
    done = set_up(checkout, **machine(checkout, release, {"python3": "3.12"}, ensurepip=False))
    assert done.returncode == 2
    error, hint = error_and_hint(done)
    assert error == "error: `python3` has no ensurepip, so that it makes no .venv"
    assert hint.endswith(f" install {line}")
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("release", ["debian 12", "rocky 9"])
def test_set_up_names_the_package_of_python(checkout: Path, release: str) -> None:
    done = set_up(checkout, **machine(checkout, release, {}))
    assert done.returncode == 2
    error, hint = error_and_hint(done)
    assert error == "error: `python3` is missing"
    wanted = "dnf install python3.11" if release == "rocky 9" else "apt-get install python3 python3-venv"
    assert hint.endswith(wanted)


@pytest.mark.parametrize("chosen", ["python3.10", "./.venv/bin/python"])
def test_set_up_names_a_chosen_python_without_ansible(checkout: Path, chosen: str) -> None:
    variables = machine(checkout, "debian 12", {"python3": "3.11", "python3.10": "3.10"})
    if chosen.startswith("./"):
        (checkout / ".venv/bin").mkdir(parents=True)
        shutil.copy(checkout / "bin/python3.10", checkout / ".venv/bin/python")
    else:
        variables["PYTHON"] = chosen
    done = set_up(checkout, **variables)
    assert done.returncode == 2
    error, hint = error_and_hint(done)
    assert error == f"error: `{chosen.removeprefix('./')}` is Python 3.10.9, and Ansible needs Python 3.11 or newer"
    assert ("remove .venv" in hint) == chosen.startswith("./")
    assert "PYTHON=python3.11 make setup" in hint
    assert not (checkout / "installed").exists()
