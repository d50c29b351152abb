"""`build-ops` where an op cannot be compiled: what is missing, with its package, and never exit code 0."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from calls import call
from tunetool import system_packages
from tunetool.measure.aio import build_ops, ops
from tunetool.measure.worker import Missing

REFUSES = """
class AsyncIOBuilder:
    error_log = "async_io requires the dev libaio .so object and headers but these were not found."
    def is_compatible(self, verbose=False):
        return False
"""


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    """A torch and a DeepSpeed whose builder of I/O does not fit this machine."""
    files = {
        "torch/__init__.py": "",
        "torch/version.py": "__version__ = '2.11.0'\ncuda = None\nhip = None\n",
        "deepspeed/__init__.py": "",
        "deepspeed/git_version_info_installed.py": "version = '0.19.8'\n",
        "deepspeed/ops/__init__.py": "",
        # Compiled when DeepSpeed was installed.
        "deepspeed/ops/utils_op.so": "",
        "deepspeed/ops/adam/cpu_adam_op.so": "",
        "deepspeed/ops/op_builder/__init__.py": REFUSES,
    }
    for name, text in files.items():
        path = tmp_path / "libraries" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "libraries"


def run(tmp_path: Path, libraries: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = [str(libraries), *filter(None, [os.environ.get("PYTHONPATH")])]
    changes = {
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "ops"),
        "HOME": str(tmp_path),
    }
    script = (
        "import sys, tunetool.system_packages as packages\n"
        "packages.find = lambda program: None if 'libaio' in program else '/usr/bin/true'\n"
        "from tunetool.cli.main import main\nsys.exit(main())\n"
    )
    return call(sys.executable, "-c", script, "build-ops", *words, env={**os.environ, **changes})


@pytest.mark.parametrize("words", [(), ("--op", "async_io")])
def test_an_op_that_cannot_be_built_ends_with_3_and_its_package(
    words: tuple[str, ...], tmp_path: Path, libraries: Path
) -> None:
    done = run(tmp_path, libraries, *words)
    assert done.returncode == 3, done.stdout + done.stderr
    error, hint = done.stderr.splitlines()[-2:]
    assert error.startswith("error: ")
    assert "async_io" in error
    assert hint.startswith("hint: install what is missing: ")
    assert "libaio" in hint


@pytest.mark.parametrize(("manager", "package"), [("apt-get", "libaio-dev"), ("dnf", "libaio-devel")])
def test_the_hint_is_the_line_of_this_machines_package_manager(
    manager: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / manager).write_text("#!/bin/sh\n")
    (tmp_path / manager).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "defpath", str(tmp_path))
    for module in (build_ops, ops):
        monkeypatch.setattr(module, "find", lambda program: None if "libaio" in program else program)
    assert f"{manager} install" in build_ops.cure(["async_io"], {})
    assert package in build_ops.cure(["async_io"], {})
    assert build_ops.cure(["cpu_adam"], {}).startswith("it takes `g++ libaio-dev python3-dev`")
    # `tune` does not send a user to `build-ops`, which would fail.
    installed = ops.Probe("/opt/python", "3.11", torch="2.11", deepspeed="0.19.8", root=str(tmp_path))
    with pytest.raises(Missing) as lacking:
        ops.need(installed, "async_io")
    hint = str(lacking.value.hint)
    assert hint.index(package) < hint.index("tunetool build-ops --python /opt/python")


def test_a_compiler_of_ones_own_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there: Mapping[str, str | None] = {"/usr/include/libaio.h": "/usr/include/libaio.h"}
    monkeypatch.setattr(build_ops, "find", there.get)
    assert system_packages.install_line("c++") in build_ops.cure(["async_io"], {"CXX": "/opt/gcc/bin/c++"})
