#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: run ``tunetool verify`` on the node and bring its record back."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: verify_node
short_description: Check a node against its manifest, measure its storage, and judge
version_added: "0.1.0"
description:
  - Runs C(tunetool verify), which the role P(tunetool.node.tunetool#role) installs, and returns its record.
  - A node that falls short is no failure of this module. RV(rc) and RV(record) say it, and the caller decides.
  - Measuring writes to the target for a minute or so, in a directory of its own that is gone afterwards.
options:
  executable:
    description: The program. Where it does not exist, C(tunetool) is looked up on the PATH.
    type: path
    default: /opt/tunetool/bin/tunetool
  expect:
    description: What the node must reach, such as V(50GBps) or V(write=25GBps). Empty for the manifest's expectations.
    type: list
    elements: str
    default: []
  level:
    description:
      - V(config) makes the checks only, without I/O. In check mode it is always that.
      - V(quick) also measures sequential read and write, V(full) the whole ladder.
    type: str
    choices: [config, quick, full]
    default: quick
  duration:
    description: Length of one sample, such as V(10s).
    type: str
    default: 4s
  tolerance:
    description: What of an expectation may be missing, such as V(2%).
    type: str
    default: 0%
  target:
    description: Directory to measure. Empty for the manifest's mount point.
    type: str
    default: ""
  allow_busy:
    description: Measure beside a job that uses the drives or GPUs.
    type: bool
    default: false
  require:
    description: Rungs without which there is no pass. V(deepspeed) is DeepSpeed's own I/O handle.
    type: list
    elements: str
    choices: [deepspeed]
    default: []
  gds:
    description:
      - Prove GPUDirect Storage by cuFile's own counters. V(auto) measures it without a say.
      - Empty for V(require) where the manifest says that it was set up, else V(off).
    type: str
    choices: ["", require, auto, "off"]
    default: ""
  python:
    description: The node's Python whose torch and DeepSpeed that rung uses. Empty for the program's own.
    type: str
    default: ""
  runs_dir:
    description: Where the node keeps its record. Empty for the program's own default.
    type: str
    default: ""
author:
  - The tunetool authors (@tunetool)
attributes:
  check_mode:
    description: Makes the checks only and measures nothing.
    support: full
  diff_mode:
    description: Nothing is changed.
    support: none
"""

EXAMPLES = r"""
- name: Measure and judge by the manifest
  tunetool.node.verify_node:
  register: verified

- name: Ask for given rates
  tunetool.node.verify_node:
    expect: [read=50GBps, write=25GBps]
    duration: 30s
"""

RETURN = r"""
record:
  description: The record as C(tunetool verify --json -) prints it.
  returned: when there is one
  type: dict
rc:
  description: Exit status of the program. 0 it holds, 1 it falls short, 3 it could not be judged.
  returned: always
  type: int
stderr_tail:
  description: The last lines of what it said meanwhile.
  returned: always
  type: list
  elements: str
"""

from typing import Any, Mapping  # noqa: E402  (Ansible wants the documentation first)

from ..module_utils.play.ansible_module import AnsibleModule  # noqa: E402
from ..module_utils.play.tunetool_command import ask  # noqa: E402


def arguments(wanted: Mapping[str, Any], check_mode: bool) -> list[str]:
    """The command line."""
    argv = ["verify", "--json", "-", "--duration", wanted["duration"], "--tolerance", wanted["tolerance"]]
    level = "config" if check_mode else wanted["level"]
    argv += ["--level", level]
    if level != "config":
        for rung in wanted["require"]:
            argv += ["--require", rung]
        if wanted["gds"]:
            argv += ["--gds", wanted["gds"]]
    for expectation in wanted["expect"]:
        argv += ["--expect", expectation]
    for option in ("target", "python", "runs_dir"):
        if wanted[option]:
            argv += ["--" + option.replace("_", "-"), wanted[option]]
    if wanted["allow_busy"]:
        argv.append("--allow-busy")
    return argv


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "executable": {"type": "path", "default": "/opt/tunetool/bin/tunetool"},
            "expect": {"type": "list", "elements": "str", "default": []},
            "level": {"type": "str", "choices": ["config", "quick", "full"], "default": "quick"},
            "duration": {"type": "str", "default": "4s"},
            "tolerance": {"type": "str", "default": "0%"},
            "target": {"type": "str", "default": ""},
            "allow_busy": {"type": "bool", "default": False},
            "require": {"type": "list", "elements": "str", "choices": ["deepspeed"], "default": []},
            "gds": {"type": "str", "choices": ["", "require", "auto", "off"], "default": ""},
            "python": {"type": "str", "default": ""},
            "runs_dir": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, **ask(module, arguments(module.params, module.check_mode)))


if __name__ == "__main__":
    main()
