"""Acceptance of many nodes: Ansible runs ``tunetool accept`` on each, and one record and one page cover all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from tunetool.accept.goals_file import GoalsFile
from tunetool.accept.run import KIND
from tunetool.fleet.playbook import HostSelection
from tunetool.fleet.run_on_hosts import Call, FleetResult, HostCommand, Hosts, record_over, run_everywhere
from tunetool.measure.progress import Progress
from tunetool.measure.session import Run
from tunetool.node.units import format_count
from tunetool.record import Record

_SECONDS = 240.0
"""About what a run takes, for the bar."""


@dataclass(frozen=True)
class FleetRequest:
    """The options of the command. ``arguments``: of the command that each host runs."""

    selection: HostSelection
    goals: GoalsFile
    arguments: Sequence[str]
    run: Run = field(default_factory=Run)


def accept_fleet(request: FleetRequest, progress: Progress) -> FleetResult:
    """Measure and judge on every host. Raises ``UsageProblem``; a host that fails gets the status ``error``."""
    goals, runs = len(request.goals.goals), len(request.goals.runs)
    said = f"on each host {format_count(goals, 'goal')} by {format_count(runs, 'run')}"
    instead = f"{said}; `tunetool accept --dry-run` there says what would be written" if request.run.dry_run else None
    return run_everywhere(
        HostCommand("run_tunetool", request.arguments, ["accept"]),
        Call(request.selection, request.run.runs_dir, instead),
        _SECONDS * runs,
        progress,
        figures=_words,
        over=lambda hosts, started: _record(request, hosts, started),
    )


def _record(request: FleetRequest, hosts: Hosts, started: datetime) -> Record:
    goals = [
        goal.model_copy(update={"host": host.host})
        for host, record in hosts
        for goal in (record.goals if record is not None and record.goals else [])
    ]
    whole = record_over(request.run.command, None, started, hosts, lambda _: False)
    return whole.model_copy(update={"kind": KIND, "goals": goals})


def _words(record: Record) -> list[str]:
    goals = record.goals or []
    return [f"{sum(each.verdict == 'held' for each in goals)} of {format_count(len(goals), 'goal')} held"]
