"""Decides whether a run continues or ends, from the reports of its guards. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tunetool.launch.spec import Failure
from tunetool.launch.watchdog import Beat, Stuck, to_blame

SETTLE_SECONDS = 1.0
"""Seconds to wait for further failures after the first: one rank's death makes others fail, and the cause is
reported."""
LOST_SECONDS = 10.0
"""Seconds without a report after which a node is lost; a guard reports several times a second."""
MEET_SECONDS = 90.0
DUMP_SECONDS = 5.0
_CONSEQUENCE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|gloo|nccl|socket|DistBackendError|DistNetworkError|recvValue", re.I
)


@dataclass(frozen=True)
class Report:
    """The state of one node. ``stuck``: the code position of each rank; None until the stacks were dumped.
    ``compiling``: seconds since a compiler of the run last computed there; None: none did."""

    node: int
    state: Literal["running", "done", "failed"] = "running"
    failure: Failure | None = None
    beats: Mapping[int, Beat] = field(default_factory=dict)
    stuck: Mapping[int, Stuck] | None = None
    compiling: float | None = None


@dataclass(frozen=True)
class Limits:
    """The limits of one run: hosts, ranks per host, and time limits in seconds."""

    hosts: Sequence[str]
    ranks_per_host: int
    timeout: float
    stall: float

    @property
    def world(self) -> int:
        """The world size: the number of ranks on all hosts."""
        return len(self.hosts) * self.ranks_per_host

    def host_of(self, rank: int) -> str:
        """The name of the host that runs ``rank``."""
        return self.hosts[rank // self.ranks_per_host]


@dataclass(frozen=True)
class Decision:
    """What the guards must do next. ``end`` without a failure: all ranks have succeeded."""

    do: Literal["go", "dump", "end"]
    failure: Failure | None = None


@dataclass
class Moments:
    """When events were first seen, in seconds since the start of the run."""

    failed: float | None = None
    dumped: float | None = None
    why: str = ""


def decide(
    limits: Limits, reports: Mapping[int, Report], silent: Mapping[int, float], now: float, moments: Moments
) -> Decision:
    """Decide what the guards must do. ``reports``: the last report of each node that has joined; ``silent``: seconds
    since that report, infinite for a closed connection; ``now``: seconds since the start of the run. The caller passes
    the same ``moments`` to every call."""
    failures = [report.failure for report in reports.values() if report.failure is not None]
    if failures:
        moments.failed = now if moments.failed is None else moments.failed
        if now - moments.failed >= SETTLE_SECONDS or len(failures) == len(limits.hosts):
            return Decision("end", first_cause(failures))
        return Decision("go")
    for node, seconds in sorted(silent.items()):
        if seconds > LOST_SECONDS:
            return Decision("end", lost(limits.hosts[node]))
    if now > MEET_SECONDS and len(reports) < len(limits.hosts):
        absent = next(host for node, host in enumerate(limits.hosts) if node not in reports)
        hint = "check that no firewall blocks the connection to the first host"
        return Decision("end", Failure(f"`{absent}` did not join within {MEET_SECONDS:.0f} s", absent, hint))
    if len(reports) == len(limits.hosts) and all(report.state == "done" for report in reports.values()):
        return Decision("end")
    return _watch(limits, reports, now, moments)


def _watch(limits: Limits, reports: Mapping[int, Report], now: float, moments: Moments) -> Decision:
    beats = {rank: beat for report in reports.values() for rank, beat in report.beats.items()}
    # Whoever waits for an op to be compiled does not beat.
    compiling = [report.compiling for report in reports.values() if report.compiling is not None]
    quiet = min([now, *(beat.age for beat in beats.values()), *compiling])
    if moments.dumped is not None and now <= limits.timeout and quiet <= limits.stall:
        moments.dumped = None  # the ranks continued while their stacks were dumped
    if moments.dumped is None:
        if now > limits.timeout:
            moments.why = f"the {limits.world} ranks did not end within {limits.timeout:.0f} s"
        elif quiet > limits.stall:
            moments.why = f"no rank made progress for {limits.stall:g} s"
        else:
            return Decision("go")
        moments.dumped = now
    # A node whose ranks have ended has no stacks.
    running = [report for report in reports.values() if report.state == "running"]
    if any(report.stuck is None for report in running) and now - moments.dumped < DUMP_SECONDS:
        return Decision("dump")
    stuck = {rank: where for report in reports.values() for rank, where in (report.stuck or {}).items()}
    return Decision("end", _hung(limits, beats, stuck, moments.why))


def _hung(limits: Limits, beats: Mapping[int, Beat], stuck: Mapping[int, Stuck], why: str) -> Failure:
    rank = to_blame(limits.world, beats, stuck)
    host = limits.host_of(rank)
    if rank not in beats:
        where = "has not started"
    elif rank in stuck:
        where = f"is at {stuck[rank].line}"
    else:
        where = "did not dump its stack: it is stuck in the kernel, or has ended"
    table = [
        f"rank {number} on {limits.host_of(number)}: {beats[number].count if number in beats else 0} beats"
        + (f", the last {beats[number].age:.0f} s ago" if number in beats else "")
        + (f", {stuck[number].line}" if number in stuck else "")
        for number in range(limits.world)
    ]
    count = beats[rank].count if rank in beats else 0
    message = f"{why}: rank {rank} on `{host}` is behind, after {count} beats, and {where}"
    return Failure(message, host, "each rank's whole stack is in its `stack.txt`", rank, raw="\n".join(table))


def lost(host: str) -> Failure:
    """The failure of a run that has lost contact with a node."""
    return Failure(f"host `{host}` is lost", host, f"check it: `ssh {host} uptime`")


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that probably caused the others: a rank ended by a signal, otherwise one whose message is not about
    connections, otherwise the first reported."""

    def order(failure: Failure) -> tuple[bool, bool]:
        return failure.exit is None or failure.exit >= 0, bool(_CONSEQUENCE.search(failure.message))

    return min(failures, key=order)
