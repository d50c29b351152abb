"""The line that a hint gives to install an extra: it names what this tunetool came from, and never an index."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from calls import ROOT, call
from tunetool import origin
from tunetool.node.common.node_wheel import SHARED
from tunetool.origin import Origin, hint_for, read_origin, source_sha256

REQUIRES = (
    "click>=8.1",
    "numpy>=1.26; extra == 'checkpoint'",
    'torch>=2.5 ; extra == "checkpoint"',
    "ansible-core<2.20,>=2.19; (python_version >= '3.11') and extra == 'control'",
    "torch>=2.5; extra == 'deepspeed'",
)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """An installed package's directory."""
    path = tmp_path / "env/lib/python3.11/site-packages/tunetool"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    path = tmp_path / "a clone"
    (path / "tools/tunetool").mkdir(parents=True)
    (path / "pyproject.toml").touch()
    return path


def hint(source: Origin, extra: str, tmp_path: Path) -> str:
    return hint_for(source, extra, tmp_path / "env/bin/python", tmp_path / "env")


def metadata(url: str, **more: object) -> str:
    """A direct_url.json."""
    return json.dumps({"url": url, **more})


def test_a_wheel_that_is_still_there(package: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "my dist/tunetool-0.1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.touch()
    text = metadata(wheel.as_uri(), archive_info={"hashes": {"sha256": "0"}})
    line = hint(read_origin(package, text, REQUIRES), "checkpoint", tmp_path)
    assert line == f"`{tmp_path}/env/bin/python -m pip install '{wheel}[checkpoint]'`"


def test_a_wheel_that_is_gone(package: Path, tmp_path: Path) -> None:
    text = metadata((tmp_path / "gone.whl").as_uri(), archive_info={})
    line = hint(read_origin(package, text, REQUIRES), "checkpoint", tmp_path)
    assert line == f"`{tmp_path}/env/bin/python -m pip install 'numpy>=1.26' 'torch>=2.5'`"


@pytest.mark.parametrize("text", [None, "", "{}", "[]", "{", '{"url": 3}', '{"url": "https://a/b", "vcs_info": {}}'])
def test_nothing_is_known(text: str | None, package: Path, tmp_path: Path) -> None:
    source = read_origin(package, text, REQUIRES)
    assert hint(source, "control", tmp_path) == (
        f"`{tmp_path}/env/bin/python -m pip install 'ansible-core<2.20,>=2.19'`"
    )
    without = hint(read_origin(package, text, ()), "gds", tmp_path)
    assert without == f"`{tmp_path}/env/bin/python -m pip install` with the packages of tunetool's extra `gds`"


def test_a_directory_that_was_copied(package: Path, clone: Path, tmp_path: Path) -> None:
    source = read_origin(package, metadata(clone.as_uri(), dir_info={}), REQUIRES)
    line = hint(source, "deepspeed", tmp_path)
    assert line == f"`{tmp_path}/env/bin/python -m pip install '{clone}[deepspeed]'`"


def test_addresses(package: Path, tmp_path: Path) -> None:
    vcs = metadata("https://example.com/t.git", vcs_info={"vcs": "git", "commit_id": "abc123"})
    line = hint(read_origin(package, vcs, REQUIRES), "gds", tmp_path)
    assert line.endswith(" install 'tunetool[gds] @ git+https://example.com/t.git@abc123'`")
    archive = metadata("https://example.com/t.whl", archive_info={})
    assert hint(read_origin(package, archive, REQUIRES), "gds", tmp_path).endswith(
        " install 'tunetool[gds] @ https://example.com/t.whl'`"
    )


def test_a_clone_that_is_used_from_an_environment_of_somebody_s(clone: Path, tmp_path: Path) -> None:
    text = metadata(clone.as_uri(), dir_info={"editable": True})
    source = read_origin(clone / "tools/tunetool", text, REQUIRES)
    line = hint(source, "finetune", tmp_path)
    assert line == f"`{tmp_path}/env/bin/python -m pip install -e '{clone}[finetune]'`"
    # Another interpreter than the one that runs.
    other = hint_for(source, "finetune", Path("/opt/v/bin/python"), tmp_path / "env")
    assert other == f"`/opt/v/bin/python -m pip install '{clone}[finetune]'`"


def test_a_clone_s_environment_is_set_up_by_make(clone: Path) -> None:
    venv = clone / ".venv"
    (venv / "bin").mkdir(parents=True)
    source = read_origin(clone / "tools/tunetool", None, REQUIRES)
    lines = {extra: hint_for(source, extra, venv / "bin/python", venv) for extra in ("control", "checkpoint", "gds")}
    assert lines == {
        "control": f"`make setup` in `{clone}`",
        "checkpoint": f"`make setup-deepspeed` in `{clone}`",
        "gds": f"`'{venv}/bin/python' -m pip install -e '{clone}[gds]'`",
    }


def test_every_hint_names_an_extra_that_exists() -> None:
    extras = set(re.findall(r"^(\w+) = \[$|^(\w+) = \[\"", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    known = {name for pair in extras for name in pair if name}
    calls = [
        (path, extra)
        for path in (ROOT / "tools/tunetool").rglob("*.py")
        for extra in re.findall(r"install_hint\(['\"](\w+)['\"]", path.read_text())
    ]
    assert len(calls) >= 12
    assert {extra for _, extra in calls} <= known
    # No other way to name an extra in a message: the package is on no index.
    for folder in ("tools/tunetool", "plugins", "roles", "playbooks"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yml", ".md", ".j2"):
                assert not re.search(r"pip install '?tunetool", path.read_text()), path


def test_the_hint_of_this_very_checkout() -> None:
    assert str(ROOT) in origin.install_hint("gds")
    assert sys.executable in origin.install_hint("gds")


def git(*arguments: object, cwd: Path) -> str:
    settings = ["-c", "user.name=n", "-c", "user.email=e", "-c", "init.defaultBranch=main"]
    done = call("git", *settings, *map(str, arguments), cwd=cwd, check=True, env=PLAIN)
    return done.stdout.strip()


PLAIN = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


@pytest.mark.parametrize("state", ["branch", "packed", "detached", "worktree"])
def test_the_commit_is_that_of_the_clone(tmp_path: Path, state: str) -> None:
    clone = tmp_path / "clone"
    (clone / "tools/tunetool").mkdir(parents=True)
    (clone / "pyproject.toml").touch()
    git("init", cwd=clone)
    assert read_origin(clone / "tools/tunetool", None, ()).commit is None, "nothing is committed yet"
    git("add", ".", cwd=clone)
    git("commit", "--allow-empty", "-m", "first", cwd=clone)
    if state == "packed":
        git("pack-refs", "--all", cwd=clone)
    elif state == "detached":
        git("checkout", "--detach", cwd=clone)
    elif state == "worktree":
        git("worktree", "add", tmp_path / "other", cwd=clone)
        clone = tmp_path / "other"
        (clone / "tools/tunetool").mkdir(parents=True)
    assert read_origin(clone / "tools/tunetool", None, ()).commit == git("rev-parse", "HEAD", cwd=clone)


def test_the_commit_that_pip_installed_is_known(tmp_path: Path) -> None:
    url = {"url": "https://example.org/t.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}
    assert read_origin(tmp_path / "a/b/tunetool", json.dumps(url), ()).commit == "abc"
    assert read_origin(tmp_path / "a/b/tunetool", "[]", ()).commit is None


def test_the_hash_is_that_of_all_python_files(tmp_path: Path) -> None:
    package = tmp_path / "tunetool"
    (package / "room").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (package / "node").symlink_to(tmp_path / "outside")
    for name in ("tunetool/a.py", "tunetool/room/b.py", "outside/__init__.py", "outside/c.py", "tunetool/d.txt"):
        (tmp_path / name).write_text(name)
    before = source_sha256(package)
    (package / "d.txt").write_text("changed")
    # Where a clone has a link, a control machine has what leads to the collection beside it,
    (package / "node").unlink()
    (package / "node").mkdir()
    (package / "node/__init__.py").write_text("__path__ = ...")
    shared = tmp_path / SHARED
    shared.parent.mkdir(parents=True)
    (tmp_path / "outside").rename(shared)
    assert source_sha256(package) == before
    # and a node a directory.
    (package / "node/__init__.py").unlink()
    (package / "node").rmdir()
    shared.rename(package / "node")
    assert source_sha256(package) == before
    (package / "node/c.py").write_text("changed")
    changed = source_sha256(package)
    (package / "room/b.py").rename(package / "room/e.py")
    assert len({before, changed, source_sha256(package)}) == 3
