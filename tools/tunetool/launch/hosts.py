"""The hosts that run ranks, from an inventory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunetool.errors import UsageProblem
from tunetool.fleet import ansible_options
from tunetool.fleet.playbook import HostSelection, Playbook, ask_ansible, choose_hosts

PLAYBOOK = "launch"


@dataclass(frozen=True)
class Host:
    """``address``: the address for connections from other hosts. ``slots``: the largest number of ranks (GPUs); None if
    unknown."""

    name: str
    address: str
    slots: int | None = None


def from_inventory(selection: HostSelection) -> list[Host]:
    """The selected hosts, in inventory order. Raises ``UsageProblem``.

    The address is ``tunetool_address``, else ``ansible_host``, else the name; the slots are ``tunetool_slots`` if set.
    """
    playbook, names = choose_hosts(PLAYBOOK, selection)
    variables = host_variables(selection.inventory, playbook)
    return [_host(name, variables.get(name, {})) for name in names]


def host_variables(inventory: Path, playbook: Playbook) -> dict[str, dict[str, Any]]:
    """Each host's inventory variables; templates are not evaluated. Raises ``CannotJudge`` or ``UsageProblem``."""
    argv = ["ansible-inventory", "-i", str(inventory.resolve()), "--list"]
    done = ask_ansible([*argv, *ansible_options.for_vault(playbook.options)], inventory, playbook)
    try:
        return dict(json.loads(done.stdout)["_meta"]["hostvars"])
    except (ValueError, KeyError, TypeError):
        errors = [line.strip() for line in done.stderr.splitlines() if "ERROR" in line]
        raise UsageProblem(f"`{inventory}` cannot be read", errors[0] if errors else None) from None


def _host(name: str, variables: Mapping[str, Any]) -> Host:
    variable = "tunetool_address" if "tunetool_address" in variables else "ansible_host"
    address = str(variables.get(variable, name))
    if "{{" in address:
        raise UsageProblem(f"`{variable}` of `{name}` is a template: `{address}`", "give the address itself")
    slots = variables.get("tunetool_slots")
    try:
        number = None if slots is None else int(slots)
    except (TypeError, ValueError):
        number = 0
    if number is not None and number < 1:
        raise UsageProblem(
            f"`tunetool_slots` of `{name}` is `{slots}`", "set it to the number of ranks that the host can run"
        )
    return Host(name, address, number)
