"""The line that a hint gives to install an extra: it names what this tunetool came from, and never an index."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from calls import ROOT
from tunetool import origin
from tunetool.origin import Origin, hint_for, read_origin

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
