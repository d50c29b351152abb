# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Documentation of the options that choose drives."""

from __future__ import annotations


class ModuleDocFragment:
    """Parts that Ansible merges into the documentation of a plugin that extends `tunetool.node.drives`."""

    DOCUMENTATION = r"""
options:
  model:
    description: Glob that the model string must match, case-sensitive.
    type: str
  size:
    description: Nominal size, such as V(3.84TB). Drives within 1 % of it match.
    type: str
  transport:
    description: Transport as sysfs names it.
    type: str
  serials:
    description:
      - Exact serial numbers that the inventory pins; other drives are ignored. Where drives of a node share one, each
        is known by more, as C(tunetool inspect) shows it (C(nvme_card@0000:00:05.0-n3)).
    type: list
    elements: str
    default: []
"""
