"""One command on many nodes: Ansible runs a play on them and returns the hosts' records; one record covers all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tunetool import record as records
from tunetool.errors import ExitCode, UsageProblem
from tunetool.fleet.playbook import HostSelection, Playbook, Run, announce, choose_hosts, run_playbook
from tunetool.fleet.same_reasons import same_reasons
from tunetool.measure.made_by import made_by, node_facts
from tunetool.measure.progress import Progress
from tunetool.node.play import reasons
from tunetool.node.play.host_summary import one_line
from tunetool.node.units import format_count
from tunetool.record import FleetHost, Measurement, Record, Verdict, host_file
from tunetool.user_directories import default_runs_dir, prepare_runs_dir
from tunetool.verdict import Case, code_of, judge

Hosts = Sequence[tuple[FleetHost, Record | None]]
"""Each host's entry in the fleet's record, and its own record if one came back."""


@dataclass(frozen=True)
class FleetResult:
    """The fleet's record and those of its hosts. A dry run has no record."""

    record: Record | None
    path: Path | None
    hosts: Hosts
    code: ExitCode


@dataclass(frozen=True)
class HostCommand:
    """The command that each host runs. An option that ``arguments`` lack may come from the inventory, if ``playbook``
    reads it there."""

    playbook: str
    arguments: Sequence[str]
    command: Sequence[str] = ()
    """Its words, if ``playbook`` does not set them."""
    become: bool = True
    """Whether it runs as root."""
    more: Mapping[str, object] = field(default_factory=dict)
    """Other variables of the playbook."""


@dataclass(frozen=True)
class Call:
    """On which hosts the command runs, and where the records go."""

    selection: HostSelection
    runs_dir: Path | None
    instead: str | None = None
    """Said in place of running it, for a dry run."""


@dataclass(frozen=True)
class Play:
    """A play over the hosts of an inventory."""

    wanted: HostCommand
    playbook: Playbook
    selection: HostSelection
    names: Sequence[str]
    forks: int


def run_everywhere(
    wanted: HostCommand,
    call: Call,
    seconds: float,
    progress: Progress,
    *,
    figures: Callable[[Record], Sequence[str]],
    over: Callable[[Hosts, datetime], Record],
    compare: Callable[[Hosts], Hosts] = lambda hosts: hosts,
) -> FleetResult:
    """Run it on every host, and keep the hosts' records with one ``over`` them. Raises ``UsageProblem``.

    ``seconds`` and ``figures``: see ``run``; ``compare`` may add to what is said of the hosts.
    """
    started = records.utc_now()
    play = prepare(wanted, call.selection, progress)
    if call.instead is not None:
        progress.say(call.instead)
        return FleetResult(None, None, (), ExitCode.OK)
    runs_dir = call.runs_dir or default_runs_dir()
    prepare_runs_dir(runs_dir)
    hosts = compare(run(play, seconds, progress, figures))
    return keep(over(hosts, started), hosts, runs_dir)


def prepare(wanted: HostCommand, selection: HostSelection, progress: Progress) -> Play:
    """The play, after checks that it can run. Raises ``UsageProblem``."""
    playbook, names = choose_hosts(wanted.playbook, selection)
    return Play(wanted, playbook, selection, names, announce(names, selection.forks, progress))


def variables(wanted: HostCommand) -> dict[str, object]:
    """The variables of playbooks/run_tunetool.yml. The caller judges, not the play."""
    command = {"run_tunetool_command": list(wanted.command)} if wanted.command else {}
    return {
        "run_tunetool_arguments": list(wanted.arguments),
        "run_tunetool_become": wanted.become,
        "run_tunetool_judge": False,
        **command,
        **wanted.more,
    }


def run(
    play: Play, seconds: float, progress: Progress, figures: Callable[[Record], Sequence[str]]
) -> list[tuple[FleetHost, Record | None]]:
    """Every host's result. ``seconds``: expected duration, for the bar; ``figures``: text about a host that is done."""

    def words(host: str, event: Mapping[str, Any]) -> str:
        outcome, record = host_result(host, event)
        if record is None:
            return f"{outcome.status.upper()}, {reasons.shared(host, outcome.reasons[0])}"
        return ", ".join([outcome.status.upper(), *figures(record)])

    outcomes = last_events(play, seconds, progress, words)
    return [host_result(name, outcomes.get(name)) for name in play.names]


def last_events(
    play: Play, seconds: float, progress: Progress, words: Callable[[str, Mapping[str, Any]], str]
) -> dict[str, Mapping[str, Any]]:
    """Run the play. Returns Ansible's last event about each host; ``words``: text about a host that is done.

    Of many hosts the start is not said, and what stopped several of them is said once: the result has the count.
    """
    outcomes: dict[str, Mapping[str, Any]] = {}
    heard: set[str] = set()

    def on_event(kind: str, data: Mapping[str, Any]) -> None:
        host = data.get("host")
        if not isinstance(host, str):
            return
        if kind == "runner_on_start":
            if len(play.names) <= reasons.MOST_NAMED:
                progress.say(f"{host}: started")
        elif kind in ("runner_on_ok", "runner_on_failed", "runner_on_unreachable"):
            outcomes[host] = data
            text = words(host, data)
            if kind == "runner_on_ok" or text not in heard:
                progress.say(f"{host}: {text}")
            heard.add(text)

    selection = play.selection
    started = Run(play.playbook, selection.inventory, selection.limit, play.forks, variables(play.wanted))
    run_playbook(started, on_event, progress, format_count(len(play.names), "host"), seconds)
    return outcomes


def answer(event: Mapping[str, Any] | None, key: str) -> tuple[Any, str]:
    """What the module returned under ``key``; None with a reason where nothing came back."""
    if event is None:
        return None, "Ansible reported nothing about this host"
    result = event.get("res") or {}
    document = result.get(key)
    message = one_line(str(result.get("msg") or f"no {key} came back"))
    return document, "" if document is not None else reasons.of_result(result, message)


def host_result(name: str, event: Mapping[str, Any] | None) -> tuple[FleetHost, Record | None]:
    """A host's entry in the fleet's record, from Ansible's last event about it, and its record."""
    document, reason = answer(event, "record")
    if document is None:
        return FleetHost(host=name, status="error", reasons=[reason]), None
    try:
        record = records.parse(json.dumps(document), f"record of {name}")
    except UsageProblem as error:
        return FleetHost(host=name, status="error", reasons=[error.message]), None
    if record.verdict is None:
        return FleetHost(host=name, record_id=record.id, status="error", reasons=["its record has no verdict"]), record
    verdict = record.verdict
    judged = verdict.model_dump(include={"status", "reasons", "kinds"})
    return FleetHost(host=name, record_id=record.id, **judged), record


def record_over(
    command: Sequence[str],
    target: str | None,
    started: datetime,
    hosts: Hosts,
    wanted: Callable[[Measurement], bool] = lambda _: True,
) -> Record:
    """One record for all hosts: their ids, verdicts and their figures that are ``wanted``."""
    return Record(
        kind="fleet",
        id=records.new_id(),
        started=started,
        finished=records.utc_now(),
        node=node_facts([], None),
        tool=made_by(),
        command=list(command),
        target=target,
        measurements=[
            measurement.model_copy(update={"host": host.host})
            for host, record in hosts
            for measurement in (record.measurements if record else [])
            if wanted(measurement)
        ],
        hosts=[host for host, _ in hosts],
        verdict=_verdict([host for host, _ in hosts]),
    )


def _verdict(hosts: Sequence[FleetHost]) -> Verdict:
    """That of the whole fleet; a reason that several hosts have is one reason, with their number."""
    parts = [(host.host, Verdict(status=host.status, reasons=host.reasons)) for host in hosts]
    verdict = judge(Case(parts=parts, judged="parts"))
    shared = {name: reasons.line(group, len(hosts)) for group in same_reasons(hosts) for name in group.hosts}
    lines = [shared.get(reason.partition(": ")[0], reason) for reason in verdict.reasons]
    kinds = dict(zip(lines, verdict.kinds or [], strict=True))
    return verdict.model_copy(update={"reasons": list(kinds), "kinds": list(kinds.values()) or None})


def keep(record: Record, hosts: Hosts, runs_dir: Path) -> FleetResult:
    """Write the fleet's record, with the hosts' records beside it."""
    raw = {
        host_file(host.host): records.dumps(host_record, compact=True)
        for host, host_record in hosts
        if host_record is not None
    }
    path = records.write(record, runs_dir, raw)
    return FleetResult(record, path, hosts, code_of(record.verdict))
