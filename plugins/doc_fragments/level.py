# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Documentation of the option by which a module knows the array's level."""

from __future__ import annotations


class ModuleDocFragment:
    """Parts that Ansible merges into the documentation of a plugin that extends `tunetool.node.level`."""

    DOCUMENTATION = r"""
options:
  level:
    description: RAID level of the array.
    type: str
    choices: [raid0]
    default: raid0
"""
