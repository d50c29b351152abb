"""The list of programs that tests need, and setup.sh, which installs from it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import programs

pytestmark = pytest.mark.any_python
ROOT = Path(__file__).parents[2]
NO_GROUPS = {"setup", "deepspeed", "cluster", "monitoring"}
"""Names in the list that are not groups of tests with a time box."""


def test_every_line_has_three_columns_and_groups_that_exist() -> None:
    groups = set(re.findall(r"^\[(\S+)\]$", (ROOT / "tests/timeboxes.toml").read_text(), re.MULTILINE)) | NO_GROUPS
    for program in programs.read():
        assert set(program.needed_by) <= groups, program
        assert re.fullmatch(r"[a-z0-9][a-z0-9.+-]+", program.package), program


def test_a_missing_program_fails_the_test_and_names_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(programs, "_PATH", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match=r"`mkfs.xfs` \(package xfsprogs\) is missing\nhint: .*--for unit"):
        programs.need_program("mkfs.xfs")
    (tmp_path / "mkfs.xfs").touch(mode=0o755)
    programs.need_program("mkfs.xfs")
    with pytest.raises(KeyError):
        programs.need_program("a-program-that-is-not-in-the-list")


LIST = """\
# program package needed by
python3 python3 setup
here here-package unit
gone gone-package unit,node
twice gone-package unit
/nowhere/header.h libheader-dev deepspeed
/etc/passwd never-package unit
container-runtime podman containers
unpacked:sshd openssh-server cluster
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a list of its own, on a machine whose apt-get only says what it is asked for."""
    (tmp_path / "tools/dev").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tools/dev/setup.sh", tmp_path / "tools/dev")
    (tmp_path / "tests/programs.txt").write_text(LIST)
    (tmp_path / "bin").mkdir()
    scripts = {
        "apt-get": f'echo "$@" >> {tmp_path}/asked; [ "$1" = update ]',
        "apt-cache": 'shift; for each; do printf "%s:\\n  Candidate: 1.0\\n" "$each"; done',
        "id": "echo 0",
        "here": "true",
        "python3": "true",
        "podman": "exit 1",
        "docker": "exit 1",
    }
    for name, script in scripts.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def set_up(checkout: Path, options: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{checkout / 'bin'}:/usr/bin:/bin"}
    environment.pop("PYTHON", None)
    return subprocess.run(
        ["bash", checkout / "tools/dev/setup.sh", *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--for", "unit"], "gone-package"),
        (["--lab"], "gone-package"),
        (["--deepspeed"], "libheader-dev"),
        (["--containers", "--for", "lint,unit"], "gone-package podman"),
    ],
)
def test_set_up_installs_what_the_asked_groups_lack(checkout: Path, options: list[str], wanted: str) -> None:
    done = set_up(checkout, options)
    # The stand-in refuses to install, and setup.sh stops there.
    assert done.returncode != 0
    assert done.stdout == f"installing {wanted}\n", done.stderr
    assert (checkout / "asked").read_text().splitlines()[-1].endswith(f"--no-install-recommends {wanted}")


@pytest.mark.parametrize(
    "answer",
    ["", "gone-package:\\n  Installed: (none)\\n  Candidate: (none)\\n  Version table:\\n"],
    ids=["unknown", "only referred to"],
)
@pytest.mark.parametrize("alone", [True, False])
def test_a_package_that_this_release_lacks_is_left_out_by_name(checkout: Path, answer: str, alone: bool) -> None:
    """Ubuntu has no package of Chromium, for example: the tests that need it fail by name, and the others run."""
    other = "libheader-dev:\\n  Installed: (none)\\n  Candidate: 1.0\\n"
    script = f"#!/bin/sh\n[ $LC_ALL = C ] && [ $1 = policy ] && printf '{answer}{other}'\n"
    (checkout / "bin/apt-cache").write_text(script)
    options = ["--for", "unit"] if alone else ["--for", "unit", "--deepspeed"]
    done = set_up(checkout, options)
    lines = done.stdout.splitlines()
    # For each program of the package that is asked for.
    assert lines[:2] == [
        "`gone` (unit,node) is left out: apt has no package `gone-package`",
        "`twice` (unit) is left out: apt has no package `gone-package`",
    ]
    asked = (checkout / "asked").read_text().splitlines()
    if alone:
        assert not [line for line in asked if "install" in line]
        assert "installing" not in done.stdout
    else:
        assert asked[-1].endswith("--no-install-recommends libheader-dev")


def test_who_may_not_install_is_told_what_to_install(checkout: Path) -> None:
    (checkout / "bin/id").write_text("#!/bin/sh\necho 1000\n")
    for name in ("bash", "dirname", "env", "cat", "uname"):
        (checkout / "bin" / name).symlink_to(shutil.which(name) or name)
    done = subprocess.run(
        [checkout / "bin/bash", checkout / "tools/dev/setup.sh", "--for", "unit"],
        env={"PATH": str(checkout / "bin")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "hint: as root: apt-get install --no-install-recommends gone-package\n" in done.stderr
