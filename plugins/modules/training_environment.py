#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: a venv with torch, DeepSpeed and tunetool, DeepSpeed's ops compiled, all proven to work."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: training_environment
short_description: Build, or check, the Python environment that trains on this node
version_added: "0.1.0"
description:
  - Builds C(DIRECTORY/environments/KEY) from the lock, or takes the environment that C(python) names.
  - Compiles DeepSpeed's ops into C(DIRECTORY/ops/KEY), for this kind of machine, or takes them from an equal node.
  - Proves it in processes of their own, each with a time limit. It imports everything, loads each op, and trains one
    step by DeepSpeed with an all-reduce over the ranks of the node.
  - Only then points C(DIRECTORY/current) at it and writes the manifest's part C(training). What fails leaves both as
    they were. A job that runs keeps the environment that it was started with; one older environment stays.
options:
  settings:
    description:
      - The variables of the role P(tunetool.node.training_environment#role) without its name and without C(enabled).
    type: dict
    default: {}
  tool_python:
    description: Interpreter that the venv is made from where C(base_python) is empty.
    type: path
    default: /usr/bin/python3
  source:
    description:
      - Copy of the collection on the control machine. Its C(constraints.txt), with the extras of its C(pyproject.toml),
        is the lock.
    type: path
  archive:
    description: Archive of tunetool's wheels on the control machine, as M(tunetool.node.wheelhouse) builds it.
    type: path
  cache_dir:
    description: Directory on the control machine for ops that a node compiled; the user's cache when left out.
    type: path
  lock:
    description: Text of the lock. Set by the control machine from O(source).
    type: str
    default: ""
  wheelhouse_manifest:
    description: Manifest of the wheelhouse. Set by the control machine from C(wheelhouse).
    type: dict
  tool_files:
    description:
      - The wheels of tunetool and pip. Set by the control machine from O(archive), each with C(name), C(sha256),
        C(size_bytes) and C(unpacked_bytes).
    type: list
    elements: dict
    default: []
  tool_key:
    description: Hash of what tunetool's wheel is built from.
    type: str
    default: ""
  received:
    description: Directory on the node with wheels that were sent, beside C(DIRECTORY/wheels); empty for none.
    type: str
    default: ""
  bundle:
    description: Archive on the node with wheels that were sent together, unpacked into C(DIRECTORY/wheels).
    type: str
    default: ""
  ops_archive:
    description: Archive on the node with ops from an equal node; empty for none.
    type: str
    default: ""
  program:
    description: The tunetool program, which compiles ops for an environment that is named.
    type: path
    default: /opt/tunetool/bin/tunetool
  manifest:
    description: The node's manifest, whose part C(training) is written where there is one.
    type: path
    default: /etc/tunetool/node.json
  step:
    description: V(environment) builds the venv and ends; V(all) does everything.
    type: str
    choices: [environment, all]
    default: all
  ops_timeout:
    description: Seconds that one op may take to compile.
    type: int
    default: 1800
author:
  - The tunetool authors (@tunetool)
attributes:
  check_mode:
    description: Says what it would make, and refuses what it would refuse before it makes anything.
    support: full
  diff_mode:
    description: Shows the manifest's part before and after; what only the finished environment tells is left out.
    support: full
"""

EXAMPLES = r"""
- name: Check an environment that is there
  tunetool.node.training_environment:
    source: /srv/tunetool
    settings:
      python: /opt/conda/envs/train/bin/python
"""

RETURN = r"""
training:
  description: The manifest's part.
  returned: when it is finished
  type: dict
send:
  description: Names of the wheels that the node lacks.
  returned: success
  type: list
  elements: str
environment:
  description: Whether the venv is there.
  returned: success
  type: bool
ops_key:
  description: Key of the compiled ops; empty while the venv is not there.
  returned: success
  type: str
ops_missing:
  description: Whether the ops are still to be compiled or brought.
  returned: success
  type: bool
ops_archive:
  description: Archive of the ops that were compiled now, for equal nodes; empty for none.
  returned: success
  type: str
"""

import json  # noqa: E402  (Ansible wants the documentation first)
import os  # noqa: E402
from typing import Any  # noqa: E402

from ..module_utils.common.commands import CommandError  # noqa: E402
from ..module_utils.common.manifest import MANIFEST_PATH  # noqa: E402
from ..module_utils.common.refusal import Refusal  # noqa: E402
from ..module_utils.gds.kernel_modules import read_driver  # noqa: E402
from ..module_utils.machine.pci_tree import GPU, read_pci  # noqa: E402
from ..module_utils.play.convergence import AnsibleModule, Words, change  # noqa: E402
from ..module_utils.training import accelerator, lock, ops, wheel_files  # noqa: E402
from ..module_utils.training.environment import Wish, interpreter, need_space  # noqa: E402
from ..module_utils.training.job import (  # noqa: E402
    Request,
    Status,
    finish,
    look,
    make_environment,
    make_ops,
    ops_archive,
    planned,
)

SETTINGS: dict[str, Any] = {
    "python": {"type": "str", "default": ""},
    "directory": {"type": "path", "default": "/opt/tunetool-training"},
    "base_python": {"type": "path", "default": ""},
    "accelerator": {"type": "str", "choices": ["auto", "cuda", "cpu"], "default": "auto"},
    "trainers": {"type": "list", "elements": "str", "choices": list(lock.TRAINERS), "default": ["deepspeed"]},
    "ops": {
        "type": "list",
        "elements": "str",
        "choices": ["async_io", "utils", "gds", "cpu_adam"],
        "default": ["async_io", "utils", "cpu_adam", "gds"],
    },
    # Of the control machine: the action plugin reads it there.
    "wheelhouse": {"type": "path", "default": ""},
    "index_url": {"type": "str", "default": ""},
    "torch_index_url": {"type": "str", "default": ""},
    "compile": {"type": "bool", "default": True},
    "proof_timeout": {"type": "int", "default": 600},
}


def request_of(wanted: dict[str, Any]) -> Request:
    """The request, together with the facts of this node. Raises ``Refusal``."""
    gpus = sum(1 for device in read_pci().values() if device.kind == GPU)
    driver = read_driver()[0]
    named, wish = wanted["python"], None
    if named:
        if not os.access(named, os.X_OK):
            raise Refusal(
                "`%s` is not an interpreter on this node. hint: correct `training_environment_python`, or leave it out "
                "to have an environment built" % named
            )
        kind = "cuda" if gpus and driver and wanted["accelerator"] != accelerator.CPU else "cpu"
    else:
        wish = wish_of(wanted, gpus, driver)
        kind = wish.build.accelerator
    return Request(
        directory=wanted["directory"],
        lock=wanted["lock"],
        trainers=wanted["trainers"],
        ops=wanted["ops"],
        accelerator=kind,
        driver=driver or "",
        program=wanted["program"],
        proof_seconds=wanted["proof_timeout"],
        ops_seconds=wanted["ops_timeout"],
        wish=wish,
        named=named,
        manifest=wanted["manifest"],
        received=[os.path.join(wanted["directory"], "wheels"), *([wanted["received"]] if wanted["received"] else [])],
    )


def wish_of(wanted: dict[str, Any], gpus: int, driver: str | None) -> Wish:
    """The environment to build. Raises ``Refusal`` if the node or the wheelhouse does not allow it."""
    base = interpreter(wanted["base_python"] or wanted["tool_python"])
    torch, lock_cuda = lock.pin(wanted["lock"], "torch"), lock.cuda(wanted["lock"])
    if torch is None:
        raise Refusal("the lock names no torch. hint: constraints.txt of the collection is the lock")
    build = accelerator.choose(wanted["accelerator"], gpus, driver, torch, lock_cuda)
    document, wheels = wanted["wheelhouse_manifest"], None
    if document:
        chosen = wheel_files.choose_set(
            document, base.version, os.uname().machine, build.tag, wanted["trainers"], lock.digest(wanted["lock"])
        )
        wheels = [dict(document["files"][name], name=name) for name in chosen["files"]]
    elif build.accelerator == accelerator.CUDA and not build.default and not wanted["torch_index_url"]:
        raise Refusal(
            "driver `%s` needs torch %s for CUDA %s, and the lock's own is for CUDA %s. hint: set "
            "`training_environment_torch_index_url` to an index with that build, or update the driver"
            % (driver, torch, build.cuda, lock_cuda)
        )
    return Wish(
        directory=wanted["directory"],
        interpreter=base,
        build=build,
        lock=wanted["lock"],
        trainers=wanted["trainers"],
        tool=wanted["tool_files"],
        tool_key=wanted["tool_key"],
        index_url=wanted["index_url"],
        torch_index_url=wanted["torch_index_url"],
        wheels=wheels,
        bytecode=wanted["compile"],
    )


def lacking(request: Request, status: Status) -> list[dict[str, Any]]:
    """Wheels that the node lacks for its venv."""
    if request.wish is None or status.environment:
        return []
    return [
        dict(each)
        for each in request.wish.files
        if not any(wheel_files.has(os.path.join(folder, str(each["name"])), each) for folder in request.received)
    ]


def answer(request: Request, status: Status, training: dict[str, Any] | None) -> dict[str, Any]:
    """The result, which every step has in common."""
    before = status.manifest_training if status.manifest_there else status.state.get("training")
    after = training or (status.state["training"] if status.done else planned(request))
    return {
        "changed": not status.done,
        "environment": status.environment,
        "send": [each["name"] for each in lacking(request, status)],
        "ops_key": status.ops_key,
        "ops_missing": status.ops is None,
        "ops_archive": "",
        "diff": {
            "before_header": "training",
            "after_header": "training",
            "before": _shown(before),
            "after": _shown(after),
        },
        **({"training": after} if training or status.done else {}),
    }


def _shown(part: dict[str, Any] | None) -> str:
    return json.dumps(part, indent=2, sort_keys=True) + "\n" if part else ""


def converge(module: AnsibleModule) -> dict[str, Any]:
    """Read the state, then make what is missing, up to the requested step."""
    wanted = module.params
    if os.path.exists(wanted["bundle"]) and not module.check_mode:
        wheel_files.unpack(wanted["bundle"], os.path.join(wanted["directory"], "wheels"))
    request = request_of(wanted)
    status = look(request)
    if module.check_mode or status.done:
        absent = lacking(request, status)
        if request.wish is not None and not status.environment:
            need_space(request.wish, sum(int(each["size_bytes"]) for each in absent))
        return answer(request, status, None)
    before = status
    make_environment(request, status)
    status = look(request)
    if wanted["step"] == "environment":
        return answer(request, status, None)
    states = make_ops(request, status, wanted["ops_archive"])
    training = finish(request, status, states)
    result = dict(
        answer(request, before, training), environment=True, ops_key=status.ops_key, ops_missing=False, send=[]
    )
    # In an environment of the owner, ninja would compare times with those of other sources.
    if request.wish and status.ops is None and not wanted["ops_archive"] and ops.worth_sharing(states):
        result["ops_archive"] = ops_archive(request, status.ops_key)
        ops.pack(os.path.splitext(result["ops_archive"])[0], result["ops_archive"])
    return result


def main() -> None:
    """Bring the environment to the requested state under the node's lock, and report."""
    module = AnsibleModule(
        argument_spec={
            "settings": {"type": "dict", "default": {}, "options": SETTINGS},
            "tool_python": {"type": "path", "default": "/usr/bin/python3"},
            "source": {"type": "path"},
            "archive": {"type": "path"},
            "cache_dir": {"type": "path"},
            "lock": {"type": "str", "default": ""},
            "wheelhouse_manifest": {"type": "dict"},
            "tool_files": {"type": "list", "elements": "dict", "default": []},
            "tool_key": {"type": "str", "default": "", "no_log": False},
            "received": {"type": "str", "default": ""},
            "bundle": {"type": "str", "default": ""},
            "ops_archive": {"type": "str", "default": ""},
            "program": {"type": "path", "default": "/opt/tunetool/bin/tunetool"},
            "manifest": {"type": "path", "default": MANIFEST_PATH},
            "step": {"type": "str", "choices": ["environment", "all"], "default": "all"},
            "ops_timeout": {"type": "int", "default": 1800},
        },
        supports_check_mode=True,
    )
    words: Words = {
        CommandError: lambda error: "%s. hint: nothing that is in use was changed" % error,
        OSError: lambda error: (
            "`%s`: %s. hint: nothing that is in use was changed"
            % (error.filename or module.params["directory"], error.strerror or error)
        ),
    }
    module.exit_json(**change(module, lambda: converge(module), words))


if __name__ == "__main__":
    main()
