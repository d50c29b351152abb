# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Documentation of a module that changes a node."""

from __future__ import annotations


class ModuleDocFragment:
    """Parts that Ansible merges into the documentation of a plugin that extends `tunetool.node.changes`."""

    DOCUMENTATION = r"""
options: {}
attributes:
  check_mode:
    description: Reports what would change, and changes nothing.
    support: full
  diff_mode:
    description: Shows files and live values before and after.
    support: full
"""
