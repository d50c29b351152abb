# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Documentation of a module that changes nothing."""

from __future__ import annotations


class ModuleDocFragment:
    """Parts that Ansible merges into the documentation of a plugin that extends `tunetool.node.read_only`."""

    DOCUMENTATION = r"""
options: {}
attributes:
  check_mode:
    description: Changes nothing in either mode.
    support: full
  diff_mode:
    description: Changes nothing, so there is no difference to show.
    support: none
"""
