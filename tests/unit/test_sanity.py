"""`ansible-test sanity` over the collection, as far as it runs without a package index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from calls import ROOT, call

CONTENT = ("meta", "playbooks", "plugins", "roles", "templates", "tests/sanity", "galaxy.yml", "README.md", "site.yml")
# The others make an environment with packages of their own.
TESTS = (
    "action-plugin-docs",
    "compile",
    "empty-init",
    "ignores",
    "line-endings",
    "no-assert",
    "no-get-exception",
    "no-illegal-filenames",
    "no-smart-quotes",
    "replace-urlopen",
    "shebang",
    "symlinks",
    "use-argspec-type-path",
    "use-compat-six",
)


def sanity(collection: Path, home: Path) -> subprocess.CompletedProcess[str]:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    tests = [f"--test={name}" for name in TESTS]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ANSIBLE"))}
    environment |= {"HOME": str(home), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return call(
        str(Path(sys.executable).with_name("ansible-test")),
        "sanity",
        f"--python={version}",
        "--color=no",
        *tests,
        cwd=collection,
        env=environment,
    )


def test_the_collection_passes_and_a_fault_does_not(tmp_path: Path) -> None:
    pytest.importorskip("ansible", reason="ansible-core is for control machines, with Python 3.11 and newer")
    collection = tmp_path / "ansible_collections/tunetool/node"
    collection.mkdir(parents=True)
    for name in CONTENT:
        source, target = ROOT / name, collection / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    done = sanity(collection, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("Running sanity test") + done.stdout.count("Running sanity test") == len(TESTS)
    with (collection / "plugins/modules/wheelhouse.py").open("a") as stream:
        stream.write("assert True\n")
    done = sanity(collection, tmp_path)
    assert done.returncode != 0
    assert "plugins/modules/wheelhouse.py" in done.stdout + done.stderr
