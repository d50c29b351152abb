# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Documentation of the option that names drives whose contents may be lost."""

from __future__ import annotations


class ModuleDocFragment:
    """Parts that Ansible merges into the documentation of a plugin that extends `tunetool.node.wipes`."""

    DOCUMENTATION = r"""
options:
  wipes:
    description:
      - Drives whose contents may be lost, from an applied plan, as the filter P(tunetool.node.plan_wipes#filter) gives
        them. A drive whose contents changed since, or that anything uses, is never touched.
    type: list
    elements: dict
    default: []
    suboptions:
      serial:
        description: Serial number of the drive.
        type: str
        required: true
      hash:
        description: Hash of its contents, from the plan file.
        type: str
        required: true
"""
