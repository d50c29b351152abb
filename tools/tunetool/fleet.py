"""Many nodes side by side: Ansible runs ``tunetool verify`` on each, their records come back, one verdict."""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tunetool
from tunetool import record as records
from tunetool.errors import CannotJudge, ExitCode, UsageProblem
from tunetool.measure.facts import node_facts
from tunetool.measure.figures import NAMES
from tunetool.measure.progress import Progress
from tunetool.node.units import format_bandwidth
from tunetool.record import Expectation, FleetHost, Record, Verdict
from tunetool.verdict import TOLERANCE, exit_code, worst

MOST_FORKS = 100
_CONTROL_HINT = "run `pip install 'tunetool[control]'` on this machine (Python 3.11 or newer)"
_HOST_LIST_TIMEOUT = 300


@dataclass(frozen=True)
class FleetRequest:
    """What the caller asked for."""

    inventory: Path
    limit: str | None = None
    forks: int | None = None
    expect: Mapping[str, float] = field(default_factory=dict)
    target: str | None = None
    duration: float = 10.0
    level: str = "quick"
    allow_busy: bool = False
    runs_dir: Path | None = None
    dry_run: bool = False
    command: Sequence[str] = ()


@dataclass(frozen=True)
class FleetResult:
    """The fleet's record and its hosts' own. No record for a dry run."""

    record: Record | None
    path: Path | None
    hosts: Sequence[tuple[FleetHost, Record | None]]
    code: ExitCode


@dataclass(frozen=True)
class _Playbook:
    """What Ansible is to run, and how it finds our collection."""

    name: str
    environment: Mapping[str, str]


def verify_fleet(request: FleetRequest, progress: Progress) -> FleetResult:
    """Verify every host. Raises ``UsageProblem`` when the call is wrong; a host that fails is an ``error`` there."""
    started = records.utc_now()
    _need_ansible()
    if not request.inventory.exists():
        raise UsageProblem(
            f"`{request.inventory}` does not exist",
            "`-i` takes an inventory file or directory, such as `inventory/lab`",
        )
    playbook = find_playbook()
    names = list_hosts(request, playbook)
    forks = request.forks or min(len(names), MOST_FORKS)
    progress.say(f"{len(names)} hosts, {forks} at once: {', '.join(names[:10])}{' ...' if len(names) > 10 else ''}")
    if request.dry_run:
        progress.say("`tunetool verify --dry-run` on a host says what would be written there")
        return FleetResult(None, None, (), ExitCode.OK)
    runs_dir = request.runs_dir or records.default_runs_dir()
    records.prepare_runs_dir(runs_dir)
    outcomes = _run(request, playbook, forks, names, progress)
    hosts = [host_result(name, outcomes.get(name)) for name in names]
    record = fleet_record(request, hosts, started)
    raw = {
        f"hosts/{re.sub(r'[^A-Za-z0-9._-]', '_', host.host)}.json": records.dumps(found)
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
    }
    if request.expect:
        variables["verify_expect"] = [f"{name}={rate:.3f}B/s" for name, rate in sorted(request.expect.items())]
    if request.target is not None:
        variables["verify_target"] = request.target
    return variables


def host_result(name: str, event: Mapping[str, Any] | None) -> tuple[FleetHost, Record | None]:
    """A host's place in the fleet, from the last thing Ansible said about it."""
    if event is None:
        return FleetHost(host=name, status="error", reasons=["Ansible said nothing about this host"]), None
    result = event.get("res") or {}
    document = result.get("record")
    if document is None:
        reason = str(result.get("msg") or "no record came back")
        return FleetHost(host=name, status="error", reasons=[_one_line(reason)]), None
    try:
        record = records.parse(json.dumps(document), f"record of {name}")
    except UsageProblem as error:
        return FleetHost(host=name, status="error", reasons=[error.message]), None
    if record.verdict is None:
        return FleetHost(host=name, record_id=record.id, status="error", reasons=["its record has no verdict"]), record
    verdict = record.verdict
    return FleetHost(host=name, record_id=record.id, status=verdict.status, reasons=verdict.reasons), record


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
            Expectation(name=NAMES[direction], value=request.expect[direction], source="--expect")
            for direction in sorted(NAMES)
            if direction in request.expect
        ],
        tolerance=TOLERANCE,
        measurements=figures,
        hosts=[host for host, _ in hosts],
        verdict=Verdict(
            status=worst([host.status for host, _ in hosts]),
            reasons=[f"{host.host}: {reason}" for host in short for reason in host.reasons[:1] or [host.status]],
        ),
    )


def find_playbook() -> _Playbook:
    """playbooks/verify.yml of the clone this package or the caller is in, else the installed collection's."""
    for root in (Path(tunetool.__file__).resolve().parents[2], Path.cwd()):
        if (root / "playbooks/verify.yml").is_file() and (root / "galaxy.yml").is_file():
            if not (root / ".ansible/collections/ansible_collections/tunetool/node/galaxy.yml").exists():
                raise UsageProblem(
                    f"`{root}` is a clone whose collection Ansible cannot find", "run `make setup` there"
                )
            config = os.environ.get("ANSIBLE_CONFIG", str(root / "ansible.cfg"))
            return _Playbook(str(root / "playbooks/verify.yml"), {"ANSIBLE_CONFIG": config})
    return _Playbook("tunetool.node.verify", {})


def list_hosts(request: FleetRequest, playbook: _Playbook) -> list[str]:
    """The hosts that the inventory and ``--limit`` select. Raises ``UsageProblem`` when there is none."""
    argv = ["ansible", "all", "-i", str(request.inventory.resolve()), "--list-hosts"]
    argv += ["--limit", request.limit] if request.limit is not None else []
    try:
        done = subprocess.run(
            argv,
            env={**os.environ, **_environment(playbook)},
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_HOST_LIST_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CannotJudge(f"`{request.inventory}` was not read within {_HOST_LIST_TIMEOUT} s") from None
    header, *lines = done.stdout.splitlines() or [""]
    hosts = [line.strip() for line in lines if line.strip()]
    if done.returncode == 0 and header.strip().startswith("hosts (") and hosts:
        return hosts
    if request.limit is not None and "limit" in done.stderr:
        raise UsageProblem(
            f"`--limit {request.limit}` matches no host of `{request.inventory}`", f"see `{' '.join(argv[:5])}`"
        )
    told = [line for line in done.stderr.splitlines() if "ERROR" in line or "Unable to parse" in line]
    hint = told[0].strip() if told else "`inventory/lab` is filled by `tunetool lab up`"
    raise UsageProblem(f"`{request.inventory}` names no hosts", hint)


def _need_ansible() -> None:
    try:
        import ansible_runner  # noqa: F401, PLC0415
    except ImportError:
        raise UsageProblem("`ansible-runner` is not installed", _CONTROL_HINT) from None
    if shutil.which("ansible-playbook", path=_path()) is None:
        raise UsageProblem("`ansible-playbook` is not on PATH", _CONTROL_HINT)


def _path() -> str:
    # The program may be called by its path, with its environment's own bin not on PATH.
    return str(Path(sys.executable).parent) + os.pathsep + os.environ.get("PATH", os.defpath)


def _environment(playbook: _Playbook) -> dict[str, str]:
    return {**playbook.environment, "PATH": _path()}


def _run(
    request: FleetRequest, playbook: _Playbook, forks: int, names: Sequence[str], progress: Progress
) -> dict[str, Mapping[str, Any]]:
    """Run the play; return the last word on each host."""
    import ansible_runner  # noqa: PLC0415

    events: queue.SimpleQueue[tuple[str, Mapping[str, Any]]] = queue.SimpleQueue()
    cancelled = threading.Event()
    outcomes: dict[str, Mapping[str, Any]] = {}

    def on_event(event: Mapping[str, Any]) -> bool:
        # Runs in ansible-runner's thread: hand over, and let the main thread speak.
        events.put((str(event.get("event", "")), event.get("event_data") or {}))
        return False  # no event files: the records are kept by us

    private = tempfile.mkdtemp(prefix="tunetool-fleet-")
    try:
        thread, runner = ansible_runner.run_async(
            private_data_dir=private,
            playbook=playbook.name,
            inventory=str(request.inventory.resolve()),
            limit=request.limit,
            forks=forks,
            extravars=extra_variables(request),
            envvars=_environment(playbook),
            settings={"pexpect_timeout": 1},
            event_handler=on_event,
            cancel_callback=cancelled.is_set,
            quiet=True,
        )
        try:
            seconds = 7 * request.duration + 15 if request.level == "quick" else 5
            with progress.step(f"{len(names)} hosts", seconds) as tick:
                # Not join(): interrupted by Ctrl-C it takes a running thread for an ended one (Python before 3.13).
                while thread.is_alive():
                    time.sleep(0.2)
                    _drain(events, outcomes, progress)
                    tick()
                _drain(events, outcomes, progress)
        except BaseException:
            cancelled.set()
            deadline = time.monotonic() + 30
            while thread.is_alive() and time.monotonic() < deadline:
                time.sleep(0.1)
            raise
        if not outcomes and runner.rc != 0:
            raise CannotJudge(f"Ansible could not start: {_last_error(runner)}", "see `make setup`")
    finally:
        shutil.rmtree(private, ignore_errors=True)
    return outcomes


def _drain(
    events: queue.SimpleQueue[tuple[str, Mapping[str, Any]]],
    outcomes: dict[str, Mapping[str, Any]],
    progress: Progress,
) -> None:
    while not events.empty():
        kind, data = events.get()
        host = data.get("host")
        if not isinstance(host, str):
            continue
        if kind == "runner_on_start":
            progress.say(f"{host}: started")
        elif kind in ("runner_on_ok", "runner_on_failed", "runner_on_unreachable"):
            outcomes[host] = data
            found, record = host_result(host, data)
            progress.say(f"{host}: {found.status.upper()}{_figures(record)}")


def _figures(record: Record | None) -> str:
    return "".join(
        f", {measurement.parameters.get('direction')} {format_bandwidth(measurement.value)}"
        for measurement in (record.measurements if record else [])
        if measurement.name in NAMES.values()
    )


def _last_error(runner: Any) -> str:
    lines = [line.strip() for line in runner.stdout.read().splitlines() if line.strip()]
    told = [line for line in lines if "ERROR" in line]
    return _one_line((told or lines or ["it said nothing"])[-1])


def _one_line(text: str) -> str:
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())[:500]
