"""Plan or build many nodes at once; the result names the outcome of every host."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tunetool.errors import ExitCode, UsageProblem
from tunetool.fleet.playbook import HostSelection, Run, announce, choose_hosts, run_playbook
from tunetool.measure.progress import Progress
from tunetool.node.plan.plan_file import PlanError, load
from tunetool.node.play.host_summary import (
    BUILD,
    CONTROL_TASKS,
    FAILED,
    NOT_REACHED,
    PLAN,
    REFUSED,
    UNREACHABLE,
    Host,
    Summary,
    one_line,
)
from tunetool.node.play.reasons import of_result, shared
from tunetool.node.units import format_count
from tunetool.record import Status
from tunetool.verdict import exit_code as precedence

_PLAN_TASK = "tunetool.node.nvme_drives"
SUMMARY_FILE = "TUNETOOL_SUMMARY_FILE"
"""Environment variable with the file into which the callback writes its summary."""
_STATUSES: Mapping[str, Status] = {FAILED: "fail", REFUSED: "fail", UNREACHABLE: "error", NOT_REACHED: "error"}
"""Outcomes of a host that change the exit code; any other is a success."""
_SECONDS_TO_BUILD = 180.0
_SECONDS_TO_PLAN = 10.0


@dataclass(frozen=True)
class ProvisionRequest:
    """The options of the command."""

    selection: HostSelection
    plan: Path | None = None
    apply: Path | None = None
    check: bool = False
    batch: tuple[str, ...] = ()
    """Sizes of the batches, as Ansible's `serial` takes them; all at once when empty."""
    max_fail: int | None = None


@dataclass(frozen=True)
class ProvisionResult:
    """Every host of the call, in the inventory's order."""

    hosts: Sequence[Host]
    code: ExitCode
    notes: Sequence[str] = field(default_factory=list)
    tables: Mapping[str, str] = field(default_factory=dict)
    """The drives of each host with their verdicts, if a plan was made."""


def provision(request: ProvisionRequest, progress: Progress) -> ProvisionResult:
    """Plan or build every host. Raises ``UsageProblem`` for invalid options before it changes any host."""
    check_request(request)
    name = "plan" if request.plan is not None else "provision"
    playbook, names = choose_hosts(name, request.selection)
    forks = announce(names, request.selection.forks, progress)
    listener = Listener(names, request, progress)
    seconds = _SECONDS_TO_PLAN if request.plan is not None else _SECONDS_TO_BUILD
    with tempfile.TemporaryDirectory(prefix="tunetool-summary-") as directory:
        counted = Path(directory) / "summary.json"
        playbook = replace(playbook, environment={**playbook.environment, SUMMARY_FILE: str(counted)})
        selection = request.selection
        run = Run(playbook, selection.inventory, selection.limit, forks, variables(request), request.check)
        run_playbook(run, listener, progress, format_count(len(names), "host"), seconds)
        add_trips(listener.summary, counted)
    hosts = list(listener.summary.hosts.values())
    code = exit_code(hosts, written=listener.wrote or request.plan is None)
    return ProvisionResult(hosts, code, listener.notes, listener.tables)


def add_trips(summary: Summary, path: Path) -> None:
    """The counts of the callback `tunetool.node.host_summary`, which runs in Ansible's process, if it was enabled."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return
    for counted in document["hosts"]:
        if counted["host"] in summary.hosts:
            summary.hosts[counted["host"]].trips = counted["trips"]


def check_request(request: ProvisionRequest) -> None:
    """Raise ``UsageProblem`` for a plan file that cannot be written or must not be applied, and for options that
    clash."""
    if request.plan is not None and request.apply is not None:
        raise UsageProblem("`--plan` and `--apply` do not go together", "make the plan, read it, then apply it")
    if request.plan is not None and request.check:
        raise UsageProblem("`--plan` and `--dry-run` do not go together", "a plan changes nothing on the nodes anyway")
    if request.plan is not None and (request.batch or request.max_fail is not None):
        raise UsageProblem("`--plan` takes no batches", "use `--hosts-per-batch` and `--max-fail` when you build")
    if request.plan is not None and (request.plan.is_dir() or not request.plan.absolute().parent.is_dir()):
        raise UsageProblem(f"`{request.plan}` cannot be written", "`--plan` takes a file in a directory that exists")
    if request.apply is not None:
        try:
            load(str(request.apply))
        except PlanError as error:
            raise UsageProblem(error.message, error.hint) from None


def variables(request: ProvisionRequest) -> dict[str, object]:
    """The variables of the playbook. Paths are absolute: ansible-runner works in a directory of its own."""
    values: dict[str, object] = {}
    if request.plan is not None:
        values["plan_file"] = str(request.plan.absolute())
    if request.apply is not None:
        values["apply_plan"] = str(request.apply.absolute())
    if request.batch:
        values["provision_serial"] = list(request.batch)
    if request.max_fail is not None:
        values["provision_max_fail_percentage"] = request.max_fail
    return values


def exit_code(hosts: Sequence[Host], written: bool = True) -> ExitCode:
    """1 if a host failed, else 3 if a host could not be changed or reached, else 0."""
    statuses = [_STATUSES.get(host.status, "pass") for host in hosts]
    return precedence(statuses if written else [*statuses, "error"])


class Listener:
    """Turns Ansible's events into progress lines and the hosts' outcomes."""

    def __init__(self, names: Sequence[str], request: ProvisionRequest, progress: Progress) -> None:
        self.summary = Summary(names, PLAN if request.plan is not None else BUILD, request.check)
        self.tables: dict[str, str] = {}
        self.notes: list[str] = []
        self.wrote = False
        self._progress = progress
        self._said: set[tuple[str, str, str]] = set()

    def __call__(self, kind: str, data: Mapping[str, Any]) -> None:
        name = str(data.get("host"))
        if name not in self.summary.hosts or kind not in ("runner_on_ok", "runner_on_failed", "runner_on_unreachable"):
            return
        result = data.get("res") or {}
        task, action = str(data.get("task") or ""), str(data.get("task_action") or "")
        seconds = float(data.get("duration") or 0.0)
        if kind == "runner_on_ok":
            self._ok(name, task, action, result, seconds)
            return
        if kind == "runner_on_failed":
            self.summary.failed(name, action, result, seconds)
        else:
            self.summary.unreachable(name, result, seconds)
        message = str(result.get("msg") or "no message")
        status = self.summary.hosts[name].status
        # What stops many hosts is said of the first; the table at the end counts them.
        cause = (task, status, shared(name, of_result(result, one_line(message))))
        if cause in self._said:
            return
        self._said.add(cause)
        self._progress.say(f"{name}: {task}: {status.upper()}")
        for line in message.splitlines():
            self._progress.say(f"{name}:   {line}")

    def _ok(self, name: str, task: str, action: str, result: Mapping[str, Any], seconds: float) -> None:
        self.summary.ok(name, action, result, seconds)
        if action == _PLAN_TASK and self.summary.goal == PLAN:
            self.tables[name] = str(result.get("table") or "")
        elif action == "tunetool.node.write_plan":
            self.wrote = True
            self.notes.append(str(result.get("msg")))
        # What runs on this machine alone, for all hosts, is said once.
        again = action in CONTROL_TASKS and (task, "", "") in self._said
        self._said.add((task, "", ""))
        if not task.startswith("Validating arguments") and not again:
            self._progress.say(f"{name}: {task}: {'changed' if result.get('changed') else 'ok'}")
