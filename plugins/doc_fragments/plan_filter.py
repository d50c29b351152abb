# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Documentation of the filters that read a plan file."""

from __future__ import annotations


class ModuleDocFragment:
    """Parts that Ansible merges into the documentation of a plugin that extends `tunetool.node.plan_filter`."""

    DOCUMENTATION = r"""
options:
  _input:
    description: Path of the plan file; empty for no plan.
    type: str
    required: true
  host:
    description: Inventory name of the host.
    type: str
    required: true
  job:
    description: The job that applies the plan. A plan for another job is refused.
    type: str
    choices: [provision, teardown, replace]
    default: provision
"""
