"""Many nodes side by side: planned, or built, with a word on every host at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.errors import ExitCode, UsageProblem
from tunetool.measure.progress import Progress
from tunetool.node.plan import PlanError, load
from tunetool.playbook import (
    MOST_FORKS,
    Run,
    find_playbook,
    list_hosts,
    need_ansible,
    need_inventory,
    one_line,
    run_playbook,
)

BUILT, CHECKED, PLANNED = "built", "checked", "planned"
FAILED, UNREACHABLE, NOT_REACHED = "failed", "unreachable", "not reached"
_LAST_TASK = "tunetool.node.node_manifest"
"""The action with which a build ends: a host that did not come so far is not built, whatever else went well."""
_PLAN_TASK = "tunetool.node.nvme_drives"
_SECONDS_TO_BUILD = 180.0
_SECONDS_TO_PLAN = 10.0


@dataclass(frozen=True)
class ProvisionRequest:
    """What the caller asked for."""

    inventory: Path
    limit: str | None = None
    forks: int | None = None
    plan: Path | None = None
    apply: Path | None = None
    check: bool = False


@dataclass
class HostOutcome:
    """What became of one host."""

    host: str
    status: str = NOT_REACHED
    tasks: int = 0
    changed: int = 0
    reason: str = ""
    table: str = ""
    """The drives with their verdicts, where a plan was made."""


@dataclass(frozen=True)
class ProvisionResult:
    """Every host of the call, in the inventory's order."""

    hosts: Sequence[HostOutcome]
    code: ExitCode
    notes: Sequence[str] = field(default_factory=list)


def provision(request: ProvisionRequest, progress: Progress) -> ProvisionResult:
    """Plan or build every host. Raises ``UsageProblem`` when the call is wrong, before a host is touched."""
    check_files(request)
    need_ansible()
    need_inventory(request.inventory)
    playbook = find_playbook("plan" if request.plan is not None else "provision")
    names = list_hosts(request.inventory, request.limit, playbook)
    forks = request.forks or min(len(names), MOST_FORKS)
    count = f"{len(names)} host{'s' if len(names) != 1 else ''}"
    progress.say(f"{count}, {forks} at once: {', '.join(names[:10])}{' ...' if len(names) > 10 else ''}")
    listener = Listener(names, request, progress)
    run = Run(playbook, request.inventory, request.limit, forks, variables(request), request.check)
    seconds = _SECONDS_TO_PLAN if request.plan is not None else _SECONDS_TO_BUILD
    run_playbook(run, listener, progress, count, seconds)
    hosts = list(listener.hosts.values())
    return ProvisionResult(hosts, exit_code(hosts, written=listener.wrote or request.plan is None), listener.notes)


def check_files(request: ProvisionRequest) -> None:
    """Raise ``UsageProblem`` for a plan file that cannot be written, or must not be applied."""
    if request.plan is not None and request.apply is not None:
        raise UsageProblem("`--plan` and `--apply` do not go together", "make the plan, read it, then apply it")
    if request.plan is not None and request.check:
        raise UsageProblem("`--plan` and `--check` do not go together", "a plan changes nothing on the nodes anyway")
    if request.plan is not None and (request.plan.is_dir() or not request.plan.absolute().parent.is_dir()):
        raise UsageProblem(f"`{request.plan}` cannot be written", "`--plan` takes a file in a directory that exists")
    if request.apply is not None:
        try:
            load(str(request.apply))
        except PlanError as error:
            raise UsageProblem(error.message, "make a new one with `--plan FILE`") from None


def variables(request: ProvisionRequest) -> dict[str, object]:
    """The variables of the playbook. Paths are absolute: ansible-runner works in a directory of its own."""
    found: dict[str, object] = {}
    if request.plan is not None:
        found["plan_file"] = str(request.plan.absolute())
    if request.apply is not None:
        found["apply_plan"] = str(request.apply.absolute())
    return found


def exit_code(hosts: Sequence[HostOutcome], written: bool = True) -> ExitCode:
    """1 when a host failed, else 3 when one could not be worked on, else 0."""
    statuses = {host.status for host in hosts}
    if FAILED in statuses:
        return ExitCode.FALLS_SHORT
    if not written or statuses & {UNREACHABLE, NOT_REACHED}:
        return ExitCode.NOT_JUDGED
    return ExitCode.OK


class Listener:
    """Turns Ansible's events into lines of progress and the hosts' outcomes."""

    def __init__(self, names: Sequence[str], request: ProvisionRequest, progress: Progress) -> None:
        self.hosts = {name: HostOutcome(name) for name in names}
        self.notes: list[str] = []
        self.wrote = False
        self._request = request
        self._progress = progress

    def __call__(self, kind: str, data: Mapping[str, Any]) -> None:
        host = self.hosts.get(str(data.get("host")))
        if host is None or kind not in ("runner_on_ok", "runner_on_failed", "runner_on_unreachable"):
            return
        result = data.get("res") or {}
        task = str(data.get("task") or "")
        if kind == "runner_on_ok":
            self._ok(host, task, str(data.get("task_action") or ""), result)
            return
        message = str(result.get("msg") or "no message")
        host.status = FAILED if kind == "runner_on_failed" else UNREACHABLE
        host.reason = one_line(message.split("\n", 1)[0])
        self._progress.say(f"{host.host}: {task}: {host.status.upper()}")
        for line in message.splitlines():
            self._progress.say(f"{host.host}:   {line}")

    def _ok(self, host: HostOutcome, task: str, action: str, result: Mapping[str, Any]) -> None:
        host.tasks += 1
        host.changed += bool(result.get("changed"))
        if action == _LAST_TASK:
            host.status = CHECKED if self._request.check else BUILT
        elif action == _PLAN_TASK and self._request.plan is not None:
            part = result.get("plan") or {}
            host.status = PLANNED
            host.table = str(result.get("table") or "")
            host.reason = f"{part.get('array_action')}: {one_line(str(part.get('array_reason')))}"
        elif action == "tunetool.node.write_plan":
            self.wrote = True
            self.notes.append(str(result.get("msg")))
        if not task.startswith("Validating arguments"):
            self._progress.say(f"{host.host}: {task}: {'changed' if result.get('changed') else 'ok'}")
