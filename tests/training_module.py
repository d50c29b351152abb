"""The module `training_environment` as Ansible runs it on a node, with a lock of the test instead of the node's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from waiting import PATIENCE

ROOT = Path(__file__).parents[1]
DRIVER = """
import functools, json, sys, types
from pathlib import Path
from ansible.module_utils.testing import patch_module_args
order = json.loads(Path(sys.argv[1]).read_text())
from ansible_collections.tunetool.node.plugins.module_utils.play import convergence
from ansible_collections.tunetool.node.plugins.modules import training_environment as module
convergence.only_one = functools.partial(convergence.only_one, order["lock_file"])
if "driver" in order:
    # A machine with eight GPUs and this driver.
    module.read_pci = lambda: {str(number): types.SimpleNamespace(kind=module.GPU) for number in range(8)}
    module.read_driver = lambda: (order["driver"], None)
with patch_module_args(order["arguments"]):
    module.main()
"""


def as_task(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a task: what is a variable of the role comes as `settings`."""
    # Only where Ansible is.
    import yaml

    document = yaml.safe_load((ROOT / "roles/training_environment/meta/argument_specs.yml").read_text())
    names = {name.removeprefix("training_environment_") for name in document["argument_specs"]["main"]["options"]}
    settings = {name: value for name, value in values.items() if name in names}
    return {**{name: value for name, value in values.items() if name not in names}, "settings": settings}


def start(
    base: Path, arguments: Mapping[str, Any], environment: Mapping[str, str], **order: Any
) -> subprocess.Popen[str]:
    """Files of the call are in ``base``."""
    path = base / "order.json"
    path.write_text(json.dumps({"arguments": as_task(arguments), "lock_file": str(base / "lock"), **order}))
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(path)],
        env={**environment, "PYTHONPATH": str(ROOT / ".ansible/collections")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=PATIENCE)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    assert lines, err
    document: dict[str, Any] = json.loads(lines[-1])
    return document
