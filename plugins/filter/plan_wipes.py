# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""What an applied plan lets one host lose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError

from ..module_utils.plan.plan_file import PROVISION, PlanError, load, wipes

DOCUMENTATION = r"""
name: plan_wipes
short_description: What an applied plan file lets one host lose
version_added: "0.1.0"
description: Reads a plan file on the control machine. A host that it does not name may lose nothing.
extends_documentation_fragment: [tunetool.node.plan_filter]
"""

EXAMPLES = r"""
- name: Show what this host would lose
  ansible.builtin.debug:
    msg: "{{ 'plan.json' | tunetool.node.plan_wipes(inventory_hostname) }}"
"""

RETURN = r"""
_value:
  description: Serial and hash of each drive.
  type: list
  elements: dict
"""


def plan_wipes(path: str, host: str, job: str = PROVISION) -> list[dict[str, str]]:
    """Serial and hash of each drive that ``host`` may lose."""
    try:
        return wipes(load(str(path), str(job)), str(host)) if path else []
    except PlanError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """The collection's filters."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Filters by name."""
        return {"plan_wipes": plan_wipes}
