# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Documentation of the options of a file system and its offload directory."""

from __future__ import annotations


class ModuleDocFragment:
    """Parts that Ansible merges into the documentation of a plugin that extends `tunetool.node.offload`."""

    DOCUMENTATION = r"""
options:
  label:
    description: Label of the file system, at most 12 characters.
    type: str
    default: nvme_raid0
  offload_owner:
    description: Owner of the offload directory.
    type: str
    default: root
  offload_group:
    description: Group of the offload directory.
    type: str
    default: root
  offload_mode:
    description: Mode of the offload directory, octal digits.
    type: str
    default: "1777"
  services:
    description:
      - Units of systemd that need the volume, such as V(slurmd.service). They start after it and not without it.
        Drop-ins of units that are no longer named are removed.
    type: list
    elements: str
    default: []
"""
