"""The hosts that run ranks, from an inventory."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunetool.errors import UsageProblem
from tunetool.fleet import ansible_options
from tunetool.fleet.playbook import HostSelection, Playbook, ask_ansible, choose_hosts
from tunetool.node.common.files import whole_number

PLAYBOOK = "launch"
_ADDRESS = re.compile(r"[^\s-]\S*")
_MOST_SLOTS = 2**16


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
    return [host_of(name, variables.get(name, {})) for name in names]


def host_variables(inventory: Path, playbook: Playbook) -> dict[str, dict[str, Any]]:
    """Each host's inventory variables; templates are not evaluated. Raises ``CannotJudge`` or ``UsageProblem``."""
    argv = ["ansible-inventory", "-i", str(inventory.resolve()), "--list"]
    done = ask_ansible([*argv, *ansible_options.for_vault(playbook.options)], inventory, playbook)
    try:
        return dict(json.loads(done.stdout)["_meta"]["hostvars"])
    except (ValueError, KeyError, TypeError):
        errors = [line.strip() for line in done.stderr.splitlines() if "ERROR" in line]
        hint = ansible_options.vault_hint(done.stderr) or (errors[0] if errors else None)
        raise UsageProblem(f"`{inventory}` cannot be read", hint) from None


def host_of(name: str, variables: Mapping[str, Any]) -> Host:
    """A host by its variables. Raises ``UsageProblem``."""
    variable = "tunetool_address" if "tunetool_address" in variables else "ansible_host"
    address = variables.get(variable, name)
    if isinstance(address, str) and "{{" in address:
        raise UsageProblem(f"`{variable}` of `{name}` is a template: `{address}`", "give the address itself")
    # ssh takes a word that begins with a hyphen for an option.
    if not isinstance(address, str) or not _ADDRESS.fullmatch(address) or not address.isprintable():
        raise UsageProblem(f"`{variable}` of `{name}` is no address: `{shown(address)}`", "a name or an IP address")
    slots = variables.get("tunetool_slots")
    # `-e` and INI inventories give numbers as text.
    number = slots if type(slots) is int else whole_number(slots) if isinstance(slots, str) else None
    if slots is not None and not (number is not None and 0 < number <= _MOST_SLOTS):
        raise UsageProblem(
            f"`tunetool_slots` of `{name}` is `{shown(slots)}`",
            "set it to the number of ranks that the host can run",
        )
    return Host(name, address, number)


def shown(value: Any) -> str:
    """A value of an inventory on one short line."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text[:60]
