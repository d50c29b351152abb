"""Staging on every node of an inventory: Ansible runs ``tunetool stage`` there and returns the records."""

from __future__ import annotations

from dataclasses import dataclass

from tunetool.errors import UsageProblem
from tunetool.fleet.playbook import HostSelection
from tunetool.fleet.run_on_hosts import Call, FleetResult, HostCommand, record_over, run_everywhere
from tunetool.measure.progress import Progress
from tunetool.node.units import format_bandwidth
from tunetool.record import Record
from tunetool.stage.remote import is_remote
from tunetool.stage.run import Request

_SECONDS = 60.0
"""Seconds for the bar; only the nodes know how much there is to copy."""


@dataclass(frozen=True)
class FleetRequest:
    """The options of the command; ``become``: run as root."""

    request: Request
    selection: HostSelection
    become: bool = True


def stage_fleet(asked: FleetRequest, progress: Progress) -> FleetResult:
    """Stage, verify or evict on every host. Raises ``UsageProblem`` for invalid options."""
    request = asked.request
    for name in (request.source, request.destination):
        if name is not None and not name.startswith("/") and not is_remote(name):
            raise UsageProblem(f"`{name}` is not absolute", "on other hosts there is no current directory")
    instead = "`tunetool stage --dry-run` on a host says what would be copied there" if request.dry_run else None
    return run_everywhere(
        host_command(asked),
        Call(asked.selection, request.runs_dir, instead),
        _SECONDS,
        progress,
        figures=_figures,
        over=lambda hosts, started: record_over(request.command, request.destination, started, hosts),
    )


def host_command(asked: FleetRequest) -> HostCommand:
    """The command that each host runs. playbooks/stage.yml turns the action into the command's words."""
    request = asked.request
    arguments = ["--replace"] if request.replace else []
    arguments += [] if request.wait else ["--no-wait"]
    arguments += ["--checksum", request.checksum] if request.checksum is not None else []
    arguments += ["--threads", str(request.threads)] if request.threads is not None else []
    # After `--`, so that a name may begin with a dash.
    arguments += ["--", *([request.source] if request.source is not None else []), request.destination]
    return HostCommand("stage", arguments, become=asked.become, more={"stage_action": request.action})


def _figures(record: Record) -> list[str]:
    return [format_bandwidth(figure.value) for figure in record.measurements]
