#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: run ``tunetool stage`` on the node and bring its record back."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: stage_node
short_description: Copy a tree of files to memory or a local disk of the node, verify it, or evict it
version_added: "0.1.0"
description:
  - Runs C(tunetool stage), which the role P(tunetool.node.tunetool#role) installs, and returns its record.
  - The destination appears whole or not at all. Where it is that copy already, nothing is copied.
options:
  executable:
    description: The program. Where it does not exist, C(tunetool) is looked up on the PATH.
    type: path
    default: /opt/tunetool/bin/tunetool
  action:
    description:
      - V(stage) copies O(source) to O(destination).
      - V(verify) reads O(destination) again and holds it against its manifest.
      - V(evict) removes it, where it is as it was staged.
    type: str
    choices: [stage, verify, evict]
    default: stage
  source:
    description: A directory on the node, or C(remote:path) where rclone is installed there. For V(stage) alone.
    type: str
    default: ""
  destination:
    description: What becomes the copy, such as V(/dev/shm/model).
    type: str
    required: true
  replace:
    description: Put the copy in the place of another tree.
    type: bool
    default: false
  checksum:
    description: What the manifest holds. Empty for the program's own default.
    type: str
    choices: ["", xxh3_64, sha256]
    default: ""
  threads:
    description: How many. 0 for the program's own default.
    type: int
    default: 0
  wait:
    description: Wait for another run that is at work on the same destination.
    type: bool
    default: true
  runs_dir:
    description: Where the node keeps its record. Empty for the program's own default.
    type: str
    default: ""
author:
  - The tunetool authors (@tunetool)
attributes:
  check_mode:
    description: The module is skipped.
    support: none
  diff_mode:
    description: There is no difference to show.
    support: none
"""

EXAMPLES = r"""
- name: Have the model in memory before the job
  tunetool.node.stage_node:
    source: /nfs/models/qwen2.5-vl-7b
    destination: /dev/shm/qwen2.5-vl-7b

- name: Give the memory back
  tunetool.node.stage_node:
    action: evict
    destination: /dev/shm/qwen2.5-vl-7b
"""

RETURN = r"""
record:
  description: The record as C(tunetool stage --json -) prints it.
  returned: when there is one
  type: dict
rc:
  description: Exit status of the program. 0 done, 1 not as it was staged, 2 the call was wrong, 3 could not be done.
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


def arguments(wanted: Mapping[str, Any]) -> list[str]:
    """The command line."""
    copying = wanted["action"] == "stage"
    argv = ["stage", "copy" if copying else wanted["action"], "--json", "-"]
    if copying:
        argv += ["--replace"] if wanted["replace"] else []
        argv += ["--checksum", wanted["checksum"]] if wanted["checksum"] else []
    argv += ["--threads", str(wanted["threads"])] if wanted["threads"] else []
    argv += [] if wanted["wait"] else ["--no-wait"]
    argv += ["--runs-dir", wanted["runs_dir"]] if wanted["runs_dir"] else []
    # What begins with a dash is a name all the same.
    return argv + ["--"] + ([wanted["source"]] if copying else []) + [wanted["destination"]]


def changed(record: Mapping[str, Any], action: str) -> bool:
    """Whether the node is another than before."""
    copied = any(figure["name"] == "stage.copy" for figure in record.get("measurements", []))
    return bool(action == "evict" or copied)


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "executable": {"type": "path", "default": "/opt/tunetool/bin/tunetool"},
            "action": {"type": "str", "choices": ["stage", "verify", "evict"], "default": "stage"},
            "source": {"type": "str", "default": ""},
            "destination": {"type": "str", "required": True},
            "replace": {"type": "bool", "default": False},
            "checksum": {"type": "str", "choices": ["", "xxh3_64", "sha256"], "default": ""},
            "threads": {"type": "int", "default": 0},
            "wait": {"type": "bool", "default": True},
            "runs_dir": {"type": "str", "default": ""},
        },
        required_if=[("action", "stage", ["source"])],
        supports_check_mode=False,
    )
    found = ask(module, arguments(module.params))
    module.exit_json(changed=changed(found["record"], module.params["action"]), **found)


if __name__ == "__main__":
    main()
