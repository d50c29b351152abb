"""Many nodes side by side: Ansible runs ``tunetool verify`` on each, their records come back, one verdict."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool import record as records
from tunetool.errors import ExitCode, UsageProblem
from tunetool.measure.expectable import EXPECTABLE
from tunetool.measure.facts import node_facts
from tunetool.measure.figures import NAMES
from tunetool.measure.outliers import OUTLIER, outliers
from tunetool.measure.progress import Progress
from tunetool.node.summary import one_line
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
from tunetool.record import Expectation, FleetHost, Record, Verdict
from tunetool.verdict import exit_code, worst

# About what a node takes by ``--duration``: level full without what it may skip, on eight drives.
_SECONDS: Mapping[str, Callable[[float], float]] = {
    "config": lambda duration: 5,
    "quick": lambda duration: 13 * duration + 25,
    "full": lambda duration: 90 * duration + 100,
}


@dataclass(frozen=True)
class FleetRequest:
    """What the caller asked for."""

    inventory: Path
    limit: str | None = None
    forks: int | None = None
    expect: Mapping[str, float] = field(default_factory=dict)
    target: str | None = None
    duration: float = 4.0
    tolerance: float = 0.0
    level: str = "quick"
    allow_busy: bool = False
    runs_dir: Path | None = None
    dry_run: bool = False
    python: str | None = None
    require: Sequence[str] = ()
    gds: str | None = None
    command: Sequence[str] = ()


@dataclass(frozen=True)
class FleetResult:
    """The fleet's record and its hosts' own. No record for a dry run."""

    record: Record | None
    path: Path | None
    hosts: Sequence[tuple[FleetHost, Record | None]]
    code: ExitCode


def verify_fleet(request: FleetRequest, progress: Progress) -> FleetResult:
    """Verify every host. Raises ``UsageProblem`` when the call is wrong; a host that fails is an ``error`` there."""
    started = records.utc_now()
    need_ansible()
    need_inventory(request.inventory)
    playbook = find_playbook("verify")
    names = list_hosts(request.inventory, request.limit, playbook)
    forks = request.forks or min(len(names), MOST_FORKS)
    progress.say(f"{len(names)} hosts, {forks} at once: {', '.join(names[:10])}{' ...' if len(names) > 10 else ''}")
    if request.dry_run:
        progress.say("`tunetool verify --dry-run` on a host says what would be written there")
        return FleetResult(None, None, (), ExitCode.OK)
    runs_dir = request.runs_dir or records.default_runs_dir()
    records.prepare_runs_dir(runs_dir)
    outcomes = _run(request, playbook, forks, names, progress)
    hosts = name_outliers([host_result(name, outcomes.get(name)) for name in names])
    record = fleet_record(request, hosts, started)
    raw = {
        f"hosts/{re.sub(r'[^A-Za-z0-9._-]', '_', host.host)}.json": records.dumps(found, compact=True)
        for host, found in hosts
        if found is not None
    }
    path = records.write(record, runs_dir, raw)
    return FleetResult(record, path, hosts, exit_code([host.status for host, _ in hosts]))


def extra_variables(request: FleetRequest) -> dict[str, object]:
    """The variables of playbooks/verify.yml. The verdict is this command's to give, not the play's."""
    variables: dict[str, object] = {
        "verify_judge": False,
        "verify_level": request.level,
        "verify_duration": f"{request.duration:g}s",
        "verify_allow_busy": request.allow_busy,
        "verify_tolerance": f"{request.tolerance * 100:g}%",
    }
    if request.expect:
        variables["verify_expect"] = [
            f"{name}={rate:.3f}{'IOPS' if EXPECTABLE[name][1] == '1/s' else 'B/s'}"
            for name, rate in sorted(request.expect.items())
        ]
    if request.target is not None:
        variables["verify_target"] = request.target
    if request.python is not None:
        variables["verify_python"] = request.python
    if request.require:
        variables["verify_require"] = list(request.require)
    if request.gds is not None:
        variables["verify_gds"] = request.gds
    return variables


def host_result(name: str, event: Mapping[str, Any] | None) -> tuple[FleetHost, Record | None]:
    """A host's place in the fleet, from the last thing Ansible said about it."""
    if event is None:
        return FleetHost(host=name, status="error", reasons=["Ansible said nothing about this host"]), None
    result = event.get("res") or {}
    document = result.get("record")
    if document is None:
        reason = str(result.get("msg") or "no record came back")
        return FleetHost(host=name, status="error", reasons=[one_line(reason)]), None
    try:
        record = records.parse(json.dumps(document), f"record of {name}")
    except UsageProblem as error:
        return FleetHost(host=name, status="error", reasons=[error.message]), None
    if record.verdict is None:
        return FleetHost(host=name, record_id=record.id, status="error", reasons=["its record has no verdict"]), record
    verdict = record.verdict
    return FleetHost(host=name, record_id=record.id, status=verdict.status, reasons=verdict.reasons), record


def name_outliers(hosts: Sequence[tuple[FleetHost, Record | None]]) -> list[tuple[FleetHost, Record | None]]:
    """The hosts, with a reason for each that is slow among its like; its own verdict stays what it is."""
    told: dict[str, list[str]] = {}
    for direction, name in sorted(NAMES.items()):
        values = {
            host.host: measurement.value
            for host, record in hosts
            for measurement in (record.measurements if record else [])
            if measurement.name == name
        }
        for each in outliers(values):
            told.setdefault(each.host, []).append(
                f"{OUTLIER}{direction} {format_bandwidth(each.value)}, {each.score:.0f} robust standard deviations "
                f"below the median {format_bandwidth(each.middle)} of {len(values)} nodes: compare its drives, links "
                "and firmware with theirs"
            )
    return [
        (host.model_copy(update={"reasons": [*host.reasons, *told.get(host.host, [])]}), record)
        for host, record in hosts
    ]


def fleet_record(request: FleetRequest, hosts: Sequence[tuple[FleetHost, Record | None]], started: Any) -> Record:
    """One record over all hosts: their ids, verdicts and sequential figures."""
    figures = [
        measurement.model_copy(update={"host": host.host})
        for host, record in hosts
        for measurement in (record.measurements if record else [])
        if measurement.name in NAMES.values()
    ]
    short = [host for host, _ in hosts if host.status != "pass"]
    return Record(
        kind="fleet",
        id=records.new_id(),
        started=started,
        finished=records.utc_now(),
        node=node_facts([], None),
        command=list(request.command),
        target=request.target,
        expectations=[
            Expectation(name=name, value=request.expect[key], unit=unit, source="--expect")
            for key, (name, unit) in EXPECTABLE.items()
            if key in request.expect
        ],
        tolerance=request.tolerance,
        measurements=figures,
        hosts=[host for host, _ in hosts],
        verdict=Verdict(
            status=worst([host.status for host, _ in hosts]),
            reasons=[f"{host.host}: {reason}" for host in short for reason in host.reasons[:1] or [host.status]],
        ),
    )


def _run(
    request: FleetRequest, playbook: Playbook, forks: int, names: Sequence[str], progress: Progress
) -> dict[str, Mapping[str, Any]]:
    """Run the play; return the last word on each host."""
    outcomes: dict[str, Mapping[str, Any]] = {}

    def on_event(kind: str, data: Mapping[str, Any]) -> None:
        host = data.get("host")
        if not isinstance(host, str):
            return
        if kind == "runner_on_start":
            progress.say(f"{host}: started")
        elif kind in ("runner_on_ok", "runner_on_failed", "runner_on_unreachable"):
            outcomes[host] = data
            found, record = host_result(host, data)
            progress.say(f"{host}: {found.status.upper()}{_figures(record)}")

    seconds = _SECONDS[request.level](request.duration)
    run = Run(playbook, request.inventory, request.limit, forks, extra_variables(request))
    run_playbook(run, on_event, progress, f"{len(names)} hosts", seconds)
    return outcomes


def _figures(record: Record | None) -> str:
    return "".join(
        f", {measurement.parameters.get('direction')} {format_bandwidth(measurement.value)}"
        for measurement in (record.measurements if record else [])
        if measurement.name in NAMES.values()
    )
