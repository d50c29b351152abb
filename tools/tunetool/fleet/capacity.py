"""The capacity of every host of an inventory for benchmarks, and which hosts do not answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunetool.fleet.playbook import MOST_FORKS, HostSelection, Run, choose_hosts, run_playbook
from tunetool.measure.progress import Progress
from tunetool.node.common.commands import last_line
from tunetool.node.machine.capacity import Capacity, capacity_of
from tunetool.node.play.host_summary import one_line
from tunetool.node.play.reasons import of_result
from tunetool.node.units import format_count

PLAYBOOK = "capacity"
_SECONDS = 10.0


@dataclass(frozen=True)
class Answers:
    """In the inventory's order: capacities of hosts, and why others cannot take part."""

    capacities: Mapping[str, Capacity]
    silent: Mapping[str, str]


def ask_hosts(selection: HostSelection, target: str, memory: str, progress: Progress) -> Answers:
    """Ask every host.

    Raises ``UsageProblem`` where the inventory cannot be read, ``CannotJudge`` without Ansible.
    """
    playbook, names = choose_hosts(PLAYBOOK, selection)
    results: dict[str, Mapping[str, Any]] = {}

    def on_event(kind: str, data: Mapping[str, Any]) -> None:
        if kind in ("runner_on_ok", "runner_on_failed", "runner_on_unreachable"):
            results[str(data.get("host"))] = data.get("res") or {}

    variables = {"capacity_target": target, "capacity_memory_target": memory}
    run = Run(playbook, selection.inventory, selection.limit, min(len(names), MOST_FORKS), variables)
    run_playbook(run, on_event, progress, f"looking at {format_count(len(names), 'host')}", _SECONDS)
    capacities: dict[str, Capacity] = {}
    silent: dict[str, str] = {}
    for name in names:
        result = results.get(name, {})
        try:
            capacities[name] = capacity_of(result["capacity"])
        except (KeyError, TypeError):
            text = str(result.get("msg") or "Ansible reported nothing about this host")
            # Ansible's message comes first, then that of ssh.
            message = one_line(last_line(text, "it does not answer"))
            silent[name] = of_result(result, message)
    return Answers(capacities, silent)
