"""Many nodes in one look: Ansible runs ``tunetool inspect`` on each, and what differs between them is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from tunetool import __version__
from tunetool.errors import ExitCode
from tunetool.fleet.playbook import HostSelection
from tunetool.fleet.run_on_hosts import HostCommand, answer, last_events, prepare
from tunetool.inspect.fleet_compare import compare
from tunetool.inspect.fleet_model import FleetInspection, FleetMember
from tunetool.inspect.model import SCHEMA_NAME, Inspection
from tunetool.measure.progress import Progress
from tunetool.node.play.reasons import shared
from tunetool.node.units import format_count
from tunetool.record import utc_now

_SECONDS = 10.0
"""Expected duration, for the bar."""


@dataclass(frozen=True)
class FleetRequest:
    """The options of the command; ``become``: run as root, who also sees the drives' health."""

    selection: HostSelection
    become: bool = True
    command: Sequence[str] = ()


def inspect_fleet(request: FleetRequest, progress: Progress) -> FleetInspection:
    """Inspect every host and compare those that answered. Raises ``UsageProblem`` when the call is wrong."""
    wanted = HostCommand("run_tunetool", [], ["inspect"], become=request.become)
    play = prepare(wanted, request.selection, progress)
    taken = utc_now()
    members: dict[str, FleetMember] = {}

    def words(host: str, event: Mapping[str, Any]) -> str:
        members[host] = member(host, event)
        return shared(host, members[host].reason or "inspected")

    last_events(play, _SECONDS, progress, words)
    hosts = [members.get(name) or member(name, None) for name in play.names]
    comparison = compare({each.host: each.inspection for each in hosts if each.inspection is not None})
    return FleetInspection(
        tool_version=__version__,
        taken=taken,
        command=list(request.command),
        facts=comparison.facts,
        differences=comparison.differences,
        hosts=hosts,
    )


def member(host: str, event: Mapping[str, Any] | None) -> FleetMember:
    """A host's inspection, or why there is none, from the last thing Ansible said about it."""
    document, reason = answer(event, "inspection")
    if document is None:
        return FleetMember(host=host, reason=reason)
    try:
        return FleetMember(host=host, inspection=Inspection.model_validate(document))
    except ValidationError as error:
        version = document.get("tool_version") if isinstance(document, Mapping) else None
        return FleetMember(
            host=host,
            reason=f"its tunetool {version or 'of an unknown version'} answers with another document than "
            f"`{SCHEMA_NAME}` of {__version__} ({format_count(error.error_count(), 'error')}); install the same "
            "version there: `tunetool provision`, role tunetool",
        )


def exit_code(fleet: FleetInspection) -> ExitCode:
    """Nothing is judged: 0 where every host was inspected, else 3."""
    return ExitCode.NOT_JUDGED if fleet.missing else ExitCode.OK
