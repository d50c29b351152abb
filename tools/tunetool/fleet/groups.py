"""The groups of an inventory, such as racks, by host: Ansible reads it, and no variable of a host is shown."""

from __future__ import annotations

import re
from pathlib import Path

from tunetool.errors import UsageProblem
from tunetool.fleet.collection import find_collection
from tunetool.fleet.playbook import Playbook, ask_ansible, need_ansible, need_inventory

_LINE = re.compile(r"^(?P<depth>(?:  \|)(?:  \|)*)--(?P<group>@?)(?P<name>.+)$")
_EVERYBODY = ("all", "ungrouped")


def groups_of(inventory: Path) -> dict[str, list[str]]:
    """By host, its groups from the outside in, without `all`. Raises ``UsageProblem`` where it cannot be read."""
    need_ansible()
    need_inventory(inventory)
    argv = ["ansible-inventory", "-i", str(inventory.resolve()), "--graph"]
    done = ask_ansible(argv, inventory, Playbook("", find_collection().environment()))
    if done.returncode != 0:
        raise UsageProblem(f"`{inventory}` cannot be read", f"see `{' '.join(argv)}`")
    return read_graph(done.stdout)


def read_graph(text: str) -> dict[str, list[str]]:
    """The hosts in the output of `ansible-inventory --graph`, each with its groups."""
    above: list[str] = []
    groups: dict[str, list[str]] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        depth = match["depth"].count("|")
        if match["group"]:
            above[depth - 1 :] = [match["name"].removesuffix(":")]
        else:
            within = groups.setdefault(match["name"], [])
            within += [name for name in above[: depth - 1] if name not in (*_EVERYBODY, *within)]
    return groups
