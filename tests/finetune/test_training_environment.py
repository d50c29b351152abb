"""The training environment with real torch and DeepSpeed, from the index that pip is set up for here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import skips
import tiny_wheels
from programs import need_program
from tunetool.node.common.node_wheel import package_wheel

pytestmark = pytest.mark.slow

pytest.importorskip("deepspeed", reason="DeepSpeed is an extra of the package: `tools/dev/setup.sh --deepspeed`")
pytest.importorskip("ansible", reason="ansible-core is for control machines, with Python 3.11 and newer")

ROOT = Path(__file__).parents[2]
DRIVER = """
import functools, json, sys
from pathlib import Path
from ansible.module_utils.testing import patch_module_args
order = json.loads(Path(sys.argv[1]).read_text())
from ansible_collections.tunetool.node.plugins.module_utils.play import convergence
from ansible_collections.tunetool.node.plugins.modules import training_environment as module
convergence.only_one = functools.partial(convergence.only_one, order["lock_file"])
with patch_module_args(order["arguments"]):
    module.main()
"""
LOADS = """
from deepspeed.ops.op_builder import AsyncIOBuilder
print("handle", hasattr(AsyncIOBuilder().load(), "aio_handle"))
"""


def call(base: Path, **arguments: Any) -> dict[str, Any]:
    order = base / "order.json"
    order.write_text(json.dumps({"arguments": arguments, "lock_file": str(base / "lock")}))
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(order)],
        env={**os.environ, "PYTHONPATH": str(ROOT / ".ansible/collections")},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr
    result: dict[str, Any] = json.loads(lines[-1])
    assert not result.get("failed"), result["msg"]
    return result


def test_real_torch_and_deepspeed_are_installed_compiled_and_proven(tmp_path: Path) -> None:
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
    first = call(tmp_path, **arguments)
    part = first["training"]
    assert part["ops"] == {"async_io": "ready", "utils": "ready"}
    assert part["accelerator"] == "cpu"
    assert {"torch", "deepspeed", "tunetool", "transformers", "peft"} <= part["packages"].keys()
    assert not call(tmp_path, **arguments)["changed"]
    python = part["python"]
    environment = {**os.environ, **part["environment"], "DS_ACCELERATOR": "cpu"}
    environment.pop("PYTHONPATH", None)
    # DeepSpeed's own loader takes the op as it is, whatever it is told of a directory to compile in.
    environment["TORCH_EXTENSIONS_DIR"] = "/proc/nowhere"
    loaded = subprocess.run([python, "-c", LOADS], env=environment, capture_output=True, text=True, check=False)
    assert "handle True" in loaded.stdout, loaded.stderr
    # The same after the ops came from an equal node.
    archive = tmp_path / "ops.tar"
    Path(first["ops_archive"]).rename(archive)
    subprocess.run(["rm", "-rf", part["ops_directory"]], check=True)
    assert call(tmp_path, **arguments, ops_archive=str(archive))["training"] == part
    loaded = subprocess.run([python, "-c", LOADS], env=environment, capture_output=True, text=True, check=False)
    assert "handle True" in loaded.stdout, loaded.stderr
