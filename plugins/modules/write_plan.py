#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: documentation of the action plugin of the same name, which runs on the control machine."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: write_plan
short_description: Write one plan file for all hosts of a play
version_added: "0.1.0"
description:
  - Collects what M(tunetool.node.nvme_drives) or M(tunetool.node.scratch_removal) answered with C(plan) on every host
    of the play, from the variable in which the job's role leaves it, and writes it atomically, mode 0600. Hosts
    without an answer are left out and named.
  - Runs on the control machine; no connection to the node is made.
options:
  path:
    description: Path of the plan file. An existing file is replaced.
    type: path
    required: true
  job:
    description: Playbook that the plan is for. No other one applies it.
    type: str
    choices: [provision, teardown, replace]
    default: provision
author:
  - The tunetool authors (@tunetool)
attributes:
  check_mode:
    description: Writes nothing.
    support: full
  diff_mode:
    description: Changes nothing on the nodes.
    support: none
"""

EXAMPLES = r"""
- name: Write the plan
  tunetool.node.write_plan:
    path: plan.json
  run_once: true
"""

RETURN = r"""
hosts:
  description: Names of the hosts in the plan.
  returned: success
  type: list
  elements: str
left_out:
  description: Names of the hosts of the play that did not answer.
  returned: success
  type: list
  elements: str
"""

if __name__ == "__main__":
    from ansible.module_utils.basic import AnsibleModule

    AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "job": {"type": "str", "choices": ["provision", "teardown", "replace"], "default": "provision"},
        },
        supports_check_mode=True,
    ).fail_json(msg="this runs as an action plugin")
