"""Many nodes at once: Ansible runs ``tunetool verify`` on each and returns their records, which get one verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from tunetool.fleet.outliers import OUTLIER, outliers
from tunetool.fleet.playbook import HostSelection
from tunetool.fleet.run_on_hosts import Call, FleetResult, HostCommand, Hosts, record_over, run_everywhere
from tunetool.measure.figures import NAMES, is_sequential
from tunetool.measure.metrics import EXPECTABLE
from tunetool.measure.progress import Progress
from tunetool.measure.session import Run
from tunetool.node.units import format_bandwidth
from tunetool.record import FleetHost, Record
from tunetool.verify.request import Demands, expectations_of

# About what a node takes by ``--duration``: level full without what it may skip, on eight drives.
_SECONDS: Mapping[str, Callable[[float], float]] = {
    "config": lambda duration: 5,
    "quick": lambda duration: 13 * duration + 25,
    "full": lambda duration: 90 * duration + 100,
}


@dataclass(frozen=True)
class FleetRequest(Demands):
    """The options of the command."""

    selection: HostSelection
    target: str | None = None
    python: str | None = None
    run: Run = field(default_factory=Run)


def verify_fleet(request: FleetRequest, progress: Progress) -> FleetResult:
    """Verify every host. Raises ``UsageProblem`` for invalid options; a host that fails gets the status ``error``."""
    instead = "`tunetool verify --dry-run` on a host says what would be written there" if request.run.dry_run else None
    return run_everywhere(
        host_command(request),
        Call(request.selection, request.run.runs_dir, instead),
        _SECONDS[request.level](request.duration),
        progress,
        figures=_figures,
        over=lambda hosts, started: fleet_record(request, hosts, started),
        compare=name_outliers,
    )


def host_command(request: FleetRequest) -> HostCommand:
    """The command that each host runs. The inventory may set options that it lacks, such as ``--target``."""
    arguments = ["--level", request.level, "--duration", f"{request.duration:g}s"]
    arguments += ["--tolerance", f"{request.tolerance * 100:g}%"]
    for name, rate in sorted(request.expect.items()):
        arguments += ["--expect", f"{name}={rate:.3f}{'IOPS' if EXPECTABLE[name].unit == '1/s' else 'B/s'}"]
    for rung in request.require:
        arguments += ["--require", rung]
    for option, value in (("--target", request.target), ("--python", request.python), ("--gds", request.gds)):
        arguments += [option, value] if value is not None else []
    return HostCommand("verify", arguments + (["--allow-busy"] if request.run.allow_busy else []))


def name_outliers(hosts: Hosts) -> list[tuple[FleetHost, Record | None]]:
    """The hosts, with a reason for each outlier, whose own verdict does not change."""
    slow: dict[str, list[str]] = {}
    for direction in sorted(NAMES):
        values = {
            host.host: measurement.value
            for host, record in hosts
            for measurement in (record.measurements if record else [])
            if is_sequential(measurement) and measurement.labels["direction"] == direction
        }
        for each in outliers(values):
            slow.setdefault(each.host, []).append(
                f"{OUTLIER}{direction} {format_bandwidth(each.value)}, {each.score:.0f} robust standard deviations "
                f"below the median {format_bandwidth(each.middle)} of {len(values)} nodes: compare its drives, links "
                "and firmware with theirs"
            )
    return [(_with_outliers(host, slow.get(host.host, [])), record) for host, record in hosts]


def _with_outliers(host: FleetHost, lines: list[str]) -> FleetHost:
    kinds = [*(host.kinds or ["unknown"] * len(host.reasons)), *["outlier"] * len(lines)]
    return host.model_copy(update={"reasons": [*host.reasons, *lines], "kinds": kinds}) if lines else host


def fleet_record(request: FleetRequest, hosts: Hosts, started: datetime) -> Record:
    """One record for all hosts: their ids, verdicts and sequential figures."""
    expectations = expectations_of(request.expect, "--expect")
    record = record_over(request.run.command, request.target, started, hosts, is_sequential)
    return record.model_copy(update={"expectations": expectations, "tolerance": request.tolerance})


def _figures(record: Record) -> list[str]:
    return [
        f"{measurement.parameters.get('direction')} {format_bandwidth(measurement.value)}"
        for measurement in record.measurements
        if is_sequential(measurement)
    ]
