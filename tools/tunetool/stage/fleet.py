"""Staging on every node of an inventory: Ansible runs ``tunetool stage`` there, the records come back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tunetool import record as records
from tunetool.errors import ExitCode, UsageProblem
from tunetool.fleet import FleetResult, host_result
from tunetool.measure.facts import node_facts
from tunetool.measure.progress import Progress
from tunetool.node.units import format_bandwidth
from tunetool.playbook import (
    MOST_FORKS,
    Playbook,
    Run,
    find_playbook,
    list_hosts,
    need_ansible,
    need_inventory,
    run_playbook,
)
from tunetool.record import FleetHost, Record, Verdict
from tunetool.stage.remote import is_remote
from tunetool.stage.run import Request
from tunetool.verdict import exit_code, worst

_SECONDS = 60.0
"""What the bar is drawn for; how much there is to copy is known on the nodes alone."""

Hosts = Sequence[tuple[FleetHost, Record | None]]


@dataclass(frozen=True)
class FleetRequest:
    """What the caller asked for; ``become``: as root."""

    request: Request
    inventory: Path
    limit: str | None = None
    forks: int | None = None
    become: bool = True


def stage_fleet(asked: FleetRequest, progress: Progress) -> FleetResult:
    """Stage, verify or evict on every host. Raises ``UsageProblem`` when the call is wrong."""
    started = records.utc_now()
    request = asked.request
    for name in (request.source, request.destination):
        if name is not None and not name.startswith("/") and not is_remote(name):
            raise UsageProblem(f"`{name}` is not absolute", "on other hosts there is no current directory")
    need_ansible()
    need_inventory(asked.inventory)
    playbook = find_playbook("stage")
    names = list_hosts(asked.inventory, asked.limit, playbook)
    forks = asked.forks or min(len(names), MOST_FORKS)
    progress.say(f"{len(names)} hosts, {forks} at once: {', '.join(names[:10])}{' ...' if len(names) > 10 else ''}")
    if request.dry_run:
        progress.say("`tunetool stage --dry-run` on a host says what would be copied there")
        return FleetResult(None, None, (), ExitCode.OK)
    runs_dir = request.runs_dir or records.default_runs_dir()
    records.prepare_runs_dir(runs_dir)
    outcomes = _run(asked, playbook, forks, names, progress)
    hosts = [host_result(name, outcomes.get(name)) for name in names]
    record = fleet_record(request, hosts, started)
    raw = {
        f"hosts/{re.sub(r'[^A-Za-z0-9._-]', '_', host.host)}.json": records.dumps(found, compact=True)
        for host, found in hosts
        if found is not None
    }
    path = records.write(record, runs_dir, raw)
    return FleetResult(record, path, hosts, exit_code([host.status for host, _ in hosts]))


def extra_variables(asked: FleetRequest) -> dict[str, object]:
    """The variables of playbooks/stage.yml."""
    request = asked.request
    variables: dict[str, object] = {
        "stage_action": request.action,
        "stage_destination": request.destination,
        "stage_replace": request.replace,
        "stage_wait": request.wait,
        "stage_become": asked.become,
        "stage_judge": False,
    }
    optional = {"source": request.source, "checksum": request.checksum, "threads": request.threads}
    return variables | {f"stage_{name}": value for name, value in optional.items() if value is not None}


def fleet_record(request: Request, hosts: Hosts, started: datetime) -> Record:
    """One record over all hosts: their ids, verdicts and figures."""
    short = [host for host, _ in hosts if host.status != "pass"]
    return Record(
        kind="fleet",
        id=records.new_id(),
        started=started,
        finished=records.utc_now(),
        node=node_facts([], None),
        command=list(request.command),
        target=request.destination,
        measurements=[
            measurement.model_copy(update={"host": host.host})
            for host, record in hosts
            for measurement in (record.measurements if record else [])
        ],
        hosts=[host for host, _ in hosts],
        verdict=Verdict(
            status=worst([host.status for host, _ in hosts]),
            reasons=[f"{host.host}: {reason}" for host in short for reason in host.reasons[:1] or [host.status]],
        ),
    )


def _run(
    asked: FleetRequest, playbook: Playbook, forks: int, names: Sequence[str], progress: Progress
) -> dict[str, Mapping[str, Any]]:
    """Run the play; return the last word on each host."""
    outcomes: dict[str, Mapping[str, Any]] = {}

    def on_event(kind: str, data: Mapping[str, Any]) -> None:
        host = data.get("host")
        if isinstance(host, str) and kind in ("runner_on_ok", "runner_on_failed", "runner_on_unreachable"):
            outcomes[host] = data
            found, record = host_result(host, data)
            rates = [format_bandwidth(figure.value) for figure in (record.measurements if record else [])]
            progress.say(f"{host}: {', '.join([found.status.upper(), *rates])}")

    run = Run(playbook, asked.inventory, asked.limit, forks, extra_variables(asked))
    run_playbook(run, on_event, progress, f"{len(names)} hosts", _SECONDS)
    return outcomes
