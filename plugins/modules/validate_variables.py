#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: documentation of the action plugin of the same name, which runs on the control machine."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: validate_variables
short_description: Check the variables of all roles, and refuse unknown ones, before anything is touched
version_added: "0.1.0"
description:
  - Reads the argument_specs of every role of this collection and validates the host's variables against them.
  - Refuses variables that begin with a role's name but that no role has, and those that differ from one of a role in
    two letters at most (one in names of fewer than twelve), and names the nearest one. Otherwise a misspelt variable
    would silently leave the default in force. A name that is further off is taken for the owner's.
  - Refuses values that no node can be built with, such as a chunk that is no size, except with O(job=teardown).
  - One error lists everything; nothing was changed then.
  - Runs on the control machine; no connection to the node is made.
  - Refuses a plan file that cannot be applied in C(apply_plan) before anything is touched.
options:
  job:
    description:
      - What the plays that follow do to the nodes. C(plan_file) without C(--tags plan), a plan for another job, and
        with V(replace) more than one host are then refused.
    type: str
    choices: [provision, teardown, replace]
extends_documentation_fragment: [tunetool.node.read_only]
author:
  - The tunetool authors (@tunetool)
"""

EXAMPLES = r"""
- name: Check all variables
  tunetool.node.validate_variables:
"""

RETURN = r""" # """

if __name__ == "__main__":
    from ansible.module_utils.basic import AnsibleModule

    AnsibleModule(
        argument_spec={"job": {"type": "str", "choices": ["provision", "teardown", "replace"]}},
        supports_check_mode=True,
    ).fail_json(msg="this runs as an action plugin")
