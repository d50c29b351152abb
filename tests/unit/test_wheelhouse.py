"""The key of a wheelhouse archive: a node installs again exactly when the contents of the package have changed."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("ansible", reason="ansible-core is for control machines, with Python 3.11 and newer")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def wheelhouse(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / ".ansible/collections"), *sys.path])
    return importlib.import_module("ansible_collections.tunetool.node.plugins.modules.wheelhouse")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the package's sources, in which links into other directories stay links."""
    for name in ("tools/tunetool", "plugins/module_utils", "templates"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "constraints.txt", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "tools/tunetool/record.py",
        "plugins/module_utils/units.py",
        "templates/report/view.html.j2",
        "templates/ds_config/zero3.json.j2",
        "constraints.txt",
    ],
)
def test_a_changed_file_of_the_package_changes_the_key(wheelhouse: ModuleType, source: Path, name: str) -> None:
    before = wheelhouse.key_of(str(source), ["3.11"], ["x86_64"])
    with (source / name).open("a") as stream:
        stream.write("\n")
    assert wheelhouse.key_of(str(source), ["3.11"], ["x86_64"]) != before


def test_what_is_compiled_on_the_way_leaves_the_key_alone(wheelhouse: ModuleType, source: Path) -> None:
    before = wheelhouse.key_of(str(source), ["3.11"], ["x86_64"])
    (source / "tools/tunetool/__pycache__").mkdir()
    (source / "tools/tunetool/__pycache__/record.cpython-311.pyc").write_bytes(b"x")
    assert wheelhouse.key_of(str(source), ["3.11"], ["x86_64"]) == before
