# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""The volume that an applied plan lets one host lose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError

from ..module_utils.plan.plan_file import PROVISION, PlanError, load, volume

DOCUMENTATION = r"""
name: plan_volume
short_description: The volume that an applied plan file lets one host lose
version_added: "0.1.0"
description: Reads a plan file on the control machine. A host that it does not name may lose no volume.
extends_documentation_fragment: [tunetool.node.plan_filter]
"""

EXAMPLES = r"""
- name: Show which volume this host would lose
  ansible.builtin.debug:
    msg: "{{ 'plan.json' | tunetool.node.plan_volume(inventory_hostname, 'teardown') }}"
"""

RETURN = r"""
_value:
  description: UUID of the array, and hash of what is in it or null; empty for no volume.
  type: dict
"""


def plan_volume(path: str, host: str, job: str = PROVISION) -> dict[str, Any]:
    """UUID of the array that ``host`` may lose, and the hash of what is in it."""
    try:
        return volume(load(str(path), str(job)), str(host)) if path else {}
    except PlanError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """The collection's filters."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Filters by name."""
        return {"plan_volume": plan_volume}
