#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: the capacity of a node for benchmarks."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: node_capacity
short_description: Say what a node has for benchmarks
version_added: "0.1.0"
description:
  - Reads where a benchmark may write, how much space and memory is free, the GPUs, and the training environment that
    C(/etc/tunetool/node.json) names. Changes nothing.
  - C(tunetool bench reference -i INVENTORY) chooses model, sizes and strategies by it.
options:
  target:
    description: Directory to which the benchmarks are to write; empty for the volume that the manifest names.
    type: str
    default: ""
  memory_target:
    description: Directory in memory, to which files are staged.
    type: str
    default: /dev/shm
extends_documentation_fragment: [tunetool.node.read_only]
author:
  - The tunetool authors (@tunetool)
"""

EXAMPLES = r"""
- name: Ask the node what it has
  tunetool.node.node_capacity:
  register: capacity
"""

RETURN = r"""
capacity:
  description: What the node has; C(problem) says why there is no C(target).
  returned: always
  type: dict
"""

from ..module_utils.machine.capacity import read_capacity  # noqa: E402  (Ansible wants the documentation first)
from ..module_utils.play.convergence import READING, AnsibleModule, in_one_line  # noqa: E402


def main() -> None:
    """Read the capacity and return it."""
    module = AnsibleModule(
        argument_spec={
            "target": {"type": "str", "default": ""},
            "memory_target": {"type": "str", "default": "/dev/shm"},
        },
        supports_check_mode=True,
    )
    with in_one_line(module, READING):
        capacity = read_capacity(module.params["target"], module.params["memory_target"])
    module.exit_json(changed=False, capacity=capacity.to_dict())


if __name__ == "__main__":
    main()
