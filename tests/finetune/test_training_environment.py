"""The training environment with real torch and DeepSpeed, from the index that pip is set up for here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import skips
import tiny_wheels
import training_module
from calls import call
from programs import need_program
from tunetool.node.common.node_wheel import package_wheel

pytestmark = pytest.mark.slow

pytest.importorskip("deepspeed", reason="DeepSpeed is an extra of the package: `tools/dev/setup.sh --deepspeed`")
pytest.importorskip("ansible", reason="ansible-core is for control machines, with Python 3.11 and newer")

ROOT = Path(__file__).parents[2]
LOADS = """
from deepspeed.ops.op_builder import AsyncIOBuilder
print("handle", hasattr(AsyncIOBuilder().load(), "aio_handle"))
"""


def made(base: Path, **arguments: Any) -> dict[str, Any]:
    result = training_module.result(training_module.start(base, arguments, os.environ))
    assert not result.get("failed"), result["msg"]
    return result


def loads(python: str, environment: Mapping[str, str]) -> bool:
    done = call(python, "-c", LOADS, env=environment)
    assert "handle True" in done.stdout, done.stderr
    return True


def test_torch_and_deepspeed_are_installed_compiled_and_proven(tmp_path: Path) -> None:
    need_program("c++")
    if skips.a_gpu():
        pytest.skip("there is a GPU here: this test is about the CPU's build")
    wheels = tmp_path / "sent"
    wheels.mkdir()
    tool = [Path(package_wheel(str(ROOT), str(wheels))), tiny_wheels.pip(wheels)]
    arguments: dict[str, Any] = {
        "directory": str(tmp_path / "opt"),
        "base_python": sys.executable,
        "ops": ["async_io", "utils"],
        "lock": (ROOT / "constraints.txt").read_text(),
        "tool_files": [tiny_wheels.entry(path) for path in tool],
        "tool_key": "1",
        "received": str(wheels),
        "manifest": str(tmp_path / "node.json"),
    }
    first = made(tmp_path, **arguments)
    part = first["training"]
    assert part["ops"] == {"async_io": "ready", "utils": "ready"}
    assert part["accelerator"] == "cpu"
    assert {"torch", "deepspeed", "tunetool", "transformers", "peft"} <= part["packages"].keys()
    assert not made(tmp_path, **arguments)["changed"]
    python = part["python"]
    environment = {**os.environ, **part["environment"], "DS_ACCELERATOR": "cpu"}
    environment.pop("PYTHONPATH", None)
    # DeepSpeed's own loader takes the op as it is, whatever it is told of a directory to compile in.
    environment["TORCH_EXTENSIONS_DIR"] = "/proc/nowhere"
    assert loads(python, environment)
    # The same after the ops came from an equal node.
    archive = tmp_path / "ops.tar"
    Path(first["ops_archive"]).rename(archive)
    subprocess.run(["rm", "-rf", part["ops_directory"]], check=True)
    assert made(tmp_path, **arguments, ops_archive=str(archive))["training"] == part
    assert loads(python, environment)
