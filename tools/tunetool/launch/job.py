"""The description of a job, the hosts that run it, from an inventory, and the interface of launchers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

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


@dataclass(frozen=True)
class Job:
    """One program that runs on ``ranks_per_host`` ranks of each host.

    ``program``: arguments for torchrun, ``("-m", "package.module", *arguments)`` or ``("script.py", *arguments)``.
    ``environment``: additional variables for the ranks. ``directory``: a directory on the control machine. Files that a
    rank writes to its ``tunetool.launch.rank.out()`` are in ``directory/rank-<RANK>`` afterwards, with its output in
    ``stdout.log`` and ``stderr.log``; also after a failure, as far as they exist.
    Without ``hosts``, the job runs on this machine. ``python``: the interpreter on the hosts; default: the current one
    for this machine; elsewhere the one that the host's manifest names for training, else /opt/tunetool/bin/python.
    ``timeout``: time limit of the run in seconds. ``stall``: seconds without a beat of any rank
    (``tunetool.launch.rank.beat``) after which every rank's stack is dumped to its ``stack.txt`` and all are ended.
    """

    program: Sequence[str]
    ranks_per_host: int
    environment: Mapping[str, str]
    directory: Path
    hosts: Sequence[Host] = ()
    python: str | None = None
    timeout: float = 3600.0
    stall: float = 300.0


class Launcher(Protocol):
    """An engine that starts ranks: ``local``, ``ssh`` (torchrun over ssh by Ansible), ``deepspeed``, ``slurm``."""

    @property
    def name(self) -> str:
        """The name of the launcher on the command line."""

    def run(self, job: Job, tick: Callable[[], None]) -> None:
        """Run the job until all ranks have succeeded; ``tick`` is called repeatedly.

        Raises ``tunetool.launch.local.RankFailed``, which names the rank and its host. Nothing of the run remains on
        any node (no process, no file in /dev/shm, no directory), also after an error or Ctrl-C.
        """
