# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""The result of each host of a run, one line each, for Ansible's callback and for `tunetool provision`. Pure."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..common.commands import last_line
from ..units import format_size_binary
from . import reasons

BUILT, CHANGED, UNCHANGED, CHECKED, PLANNED = "built", "changed", "unchanged", "checked", "planned"
REFUSED, FAILED, UNREACHABLE, NOT_REACHED = "refused", "failed", "unreachable", "not reached"
WIDTH = 100

BUILD, PLAN = "build", "plan"
"""The job of a run, which decides when a host is done."""

_PREFIX = "tunetool.node."
_ARRAY_TASK = _PREFIX + "raid_array"
_LAST_TASK = _PREFIX + "node_manifest"
"""The last action of a build: a host without it is not built, even if all its tasks succeeded."""
_PLAN_TASK = _PREFIX + "nvme_drives"
CONTROL_TASKS = frozenset(
    {
        "ansible.builtin.assert",
        "ansible.builtin.debug",
        "ansible.builtin.fail",
        "ansible.builtin.import_role",
        "ansible.builtin.import_tasks",
        "ansible.builtin.include_role",
        "ansible.builtin.include_tasks",
        "ansible.builtin.meta",
        "ansible.builtin.set_fact",
        "ansible.builtin.validate_argument_spec",
        _PREFIX + "validate_variables",
        _PREFIX + "wheelhouse",
        _PREFIX + "write_plan",
    }
)
"""Actions that run only on the control machine, for any host."""
_HEAD = ("host", "result", "tasks", "changed", "trips", "seconds", "reason")
_NUMBERS = ("tasks", "changed", "trips", "seconds")

_FULL = "No space left on device"
_ERRNO_FULL = "[Errno 28]"
_NO_TEMPORARY = "No usable temporary directory"
"""What Python says of a disk that was full before the module came."""
"""What Python prints before the words, which may be in the language of the node."""
_LINE = re.compile(r"<([^>]*)> (SSH: EXEC |EXEC |PUT |FETCH )")
_PORT = re.compile(r" -o Port=(\d+)")


@dataclass
class Host:
    """The result of one host so far."""

    host: str
    status: str = NOT_REACHED
    tasks: int = 0
    changed: int = 0
    seconds: float = 0.0
    trips: int | None = None
    """Number of round trips to the host; None if they were not counted."""
    reason: str = ""
    differences: list[dict[str, Any]] = field(default_factory=list)
    hugepages: str = ""
    """RAM that huge pages take, as text."""
    reboot_reasons: list[str] = field(default_factory=list)
    """Settings that wait for a reboot."""


def one_line(text: str) -> str:
    """Any text as one short line of printable characters."""
    words = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())[:500]
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in words)


class Summary:
    """Hosts in the order of the inventory, filled by the results of tasks."""

    def __init__(self, names: Iterable[str] = (), goal: str = "", check: bool = False) -> None:
        self.hosts = {name: Host(name) for name in names}
        self.goal = goal
        self._check = check
        self._made: set[str] = set()
        self._done: set[str] = set()
        self._waiting: dict[tuple[str, str], list[str]] = {}

    def host(self, name: str) -> Host:
        """The host's entry, made at its first result."""
        return self.hosts.setdefault(name, Host(name))

    def ok(self, name: str, action: str, result: Mapping[str, Any], seconds: float = 0.0) -> None:
        """Record a task that succeeded."""
        host = self.host(name)
        self._count(host, action, result, seconds)
        host.changed += bool(result.get("changed"))
        if action == _ARRAY_TASK and result.get("made"):
            self._made.add(name)
        if action == _LAST_TASK:
            self._done.add(name)
        part = result.get("plan")
        if action == _PLAN_TASK and isinstance(part, Mapping) and self.goal != BUILD:
            host.status = PLANNED
            host.reason = "%s: %s" % (part.get("array_action"), one_line(str(part.get("array_reason"))))
        elif host.status not in (REFUSED, FAILED, UNREACHABLE, PLANNED):
            host.status = self._good(host)

    def failed(self, name: str, action: str, result: Mapping[str, Any], seconds: float = 0.0) -> None:
        """Record a task that failed. It counts as a refusal if it is ours, has a hint and nothing was changed.

        Drift has a hint for each difference, in the lines below the first.
        """
        host = self.host(name)
        self._count(host, action, result, seconds)
        first, *others = said(result).split("\n")
        hints = [line for line in others if "hint:" in line]
        drifted = any(difference.get("hint") for difference in _differences(result))
        # In check mode earlier tasks only said what they would change.
        changed = bool(result.get("changed")) or (host.changed > 0 and not self._check)
        refused = action.startswith(_PREFIX) and ("hint:" in first or drifted) and not changed
        host.status, host.reason = REFUSED if refused else FAILED, one_line("; ".join([first, *hints]))

    def unreachable(self, name: str, result: Mapping[str, Any], seconds: float = 0.0) -> None:
        """Record that Ansible could not reach the host, or lost it."""
        host = self.host(name)
        host.seconds += seconds
        why = reasons.why_unreachable(one_line(str(result.get("msg") or "no message")))
        host.status, host.reason = UNREACHABLE, why

    def recovered(self, name: str) -> None:
        """Remove the host's failure, which its play has rescued."""
        host = self.host(name)
        host.status, host.reason = self._good(host), ""

    def _good(self, host: Host) -> str:
        if host.tasks == 0 or (self.goal == BUILD and host.host not in self._done):
            return NOT_REACHED
        if self.goal == PLAN:
            return NOT_REACHED
        if self._check:
            return CHECKED
        if host.host in self._made:
            return BUILT
        return CHANGED if host.changed else UNCHANGED

    def _count(self, host: Host, action: str, result: Mapping[str, Any], seconds: float) -> None:
        host.seconds += seconds
        host.tasks += action not in CONTROL_TASKS and "ansible.builtin." + action not in CONTROL_TASKS
        taken, ram = result.get("hugepages_bytes"), result.get("ram_bytes")
        if isinstance(taken, int) and isinstance(ram, int) and ram:
            shown = "%s of %s RAM, %.1f %%" % (format_size_binary(taken), format_size_binary(ram), 100.0 * taken / ram)
            host.hugepages = shown if taken else ""
        # A role that runs again after a reboot replaces its own earlier differences.
        reasons = result.get("reboot_reasons")
        if isinstance(reasons, list) and action.startswith(_PREFIX):
            self._waiting[(host.host, action)] = [one_line(str(reason)) for reason in reasons]
            host.reboot_reasons = [
                reason
                for (name, _), host_reasons in self._waiting.items()
                if name == host.host
                for reason in host_reasons
            ]
        host.differences += [
            {**difference, "checked": True} if self._check else difference for difference in _differences(result)
        ]


def said(result: Mapping[str, Any]) -> str:
    """The message of a failed task, with its cause where Ansible's own message names only a module."""
    message = str(result.get("msg") or "no message")
    modules = result.get("failed_modules")
    causes = [
        last_line(str(answer.get(key)), "")
        for answer in (modules.values() if isinstance(modules, Mapping) else [result])
        if isinstance(answer, Mapping)
        for key in ("module_stderr", "module_stdout", "exception")
        if answer.get(key)
    ]
    if not causes and isinstance(modules, Mapping):
        causes = [str(answer.get("msg")) for answer in modules.values() if isinstance(answer, Mapping)]
    if (_FULL in str(result) or _ERRNO_FULL in str(result)) and "hint:" not in message:
        return (
            "a disk of the node is full (%s): %s. hint: `df -h / /tmp` on the node; free space, then run this again"
            % (
                _FULL,
                message.split("\n", 1)[0].rstrip(". "),
            )
        )
    if _NO_TEMPORARY in str(result) and "hint:" not in message:
        return (
            "no temporary file can be made on the node: %s. hint: `df -h / /tmp` and `findmnt / /tmp` on the node: "
            "free space, or make it writable, then run this again" % message.split("\n", 1)[0].rstrip(". ")
        )
    first, _, rest = message.partition("\n")
    if causes and (isinstance(modules, Mapping) or "MODULE FAILURE" in first):
        first = "%s: %s" % (first.rstrip(". :"), causes[0])
    return first + ("\n" + rest if rest else "")


def _differences(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    differences = result.get("differences")
    if not isinstance(differences, list):
        return []
    return [dict(difference) for difference in differences if isinstance(difference, Mapping) and "name" in difference]


def document(hosts: Iterable[Host]) -> dict[str, Any]:
    """The summary as data for JSON."""
    return {"schema": "tunetool.summary/1", "hosts": [dataclasses.asdict(host) for host in hosts]}


def lines(hosts: Iterable[Host], width: int = WIDTH) -> list[str]:
    """The summary as text: a table with one line for each host, and its differences beneath.

    Hosts that did not get through for the same reason share one line below the table.
    """
    hosts = list(hosts)
    groups = _same_reasons(hosts)
    grouped = {name for group in groups for name in group.hosts}
    rows = [(_cells(host, host.host in grouped), host) for host in hosts if host.host not in grouped or _has_more(host)]
    widths = [max([len(title)] + [len(cells[at]) for cells, _host in rows]) for at, title in enumerate(_HEAD[:-1])]
    indent = sum(widths) + 2 * len(widths)
    shown = [_row(list(_HEAD), widths).rstrip(), "-" * width] if rows else []
    for cells, host in rows:
        # A long reason wraps within its column, which has a minimum width.
        reason = textwrap.wrap(cells[-1], max(width - indent, 30), break_long_words=False) or [""]
        shown.append(_row(cells[:-1] + reason[:1], widths).rstrip())
        shown += [" " * indent + more for more in reason[1:]]
        if host.hugepages:
            shown.append("  huge pages take %s" % host.hugepages)
        shown += ["  reboot required: %s" % reason for reason in host.reboot_reasons]
        for difference in host.differences:
            shown.append(
                "  drift: %s expected %s found %s (%s)"
                % (
                    difference["name"],
                    difference.get("expected"),
                    difference.get("found"),
                    _state(difference),
                )
            )
            if difference.get("hint") and not difference.get("mended"):
                shown.append("    hint: %s" % difference["hint"])
    for group in groups:
        hint = reasons.hint(group)
        for text, further in ((reasons.line(group, len(hosts)), "  "), ("  hint: " + hint if hint else "", "    ")):
            shown += textwrap.wrap(text, width, subsequent_indent=further, break_long_words=False)
    return shown


def _same_reasons(hosts: Iterable[Host]) -> list[reasons.SameReason]:
    """Two hosts or more that were refused, failed or were not reached for one reason."""
    entries = [
        (host.host, host.status.upper(), reasons.UNREACHABLE + host.reason)
        if host.status == UNREACHABLE
        else (host.host, host.status.upper(), host.reason)
        for host in hosts
        if host.reason and host.status in (REFUSED, FAILED, UNREACHABLE)
    ]
    return [group for group in reasons.by_reason(entries) if len(group.hosts) > 1]


def _has_more(host: Host) -> bool:
    """Whether there is something to say of the host beside its reason."""
    return bool(host.changed or host.hugepages or host.reboot_reasons or host.differences)


def _state(difference: Mapping[str, Any]) -> str:
    if not difference.get("mended"):
        return "left"
    return "would be mended" if difference.get("checked") else "mended"


def _cells(host: Host, grouped: bool = False) -> list[str]:
    trips = "-" if host.trips is None else str(host.trips)
    numbers = [str(host.tasks), str(host.changed), trips, "%.1f" % host.seconds]
    return [host.host, host.status.upper()] + numbers + ["" if grouped else host.reason]


def _row(cells: list[str], widths: list[int]) -> str:
    shown = [
        cell.rjust(width) if title in _NUMBERS else cell.ljust(width)
        for title, cell, width in zip(_HEAD, cells, widths + [0])
    ]
    return "  ".join(shown)


@dataclass(frozen=True)
class Route:
    """The connection to a host: ssh to an address and a port, or another connection plugin to a name."""

    ssh: bool
    address: str
    port: int | None = None


def trip(line: str) -> Route | None:
    """The route of a round trip that a line of Ansible's log reports; None if it reports none.

    The ssh plugin writes one `SSH: EXEC` for every ssh, sftp or scp that it starts, and a `PUT` or `FETCH` beside the
    latter two; other plugins write `EXEC`, `PUT` and `FETCH` alone. So both are told apart.
    """
    match = _LINE.match(line)
    if match is None:
        return None
    if not match[2].startswith("SSH"):
        return Route(False, match[1])
    port = _PORT.search(line)
    return Route(True, match[1], int(port[1]) if port else None)


class Trips:
    """Counts round trips by route; those of two hosts with one route cannot be separated."""

    def __init__(self) -> None:
        self._counts: dict[Route, int] = {}
        self._hosts: dict[str, Route] = {}

    def line(self, text: str) -> None:
        """Count the round trip that a line of the log reports, if any."""
        route = trip(text)
        if route is not None:
            self._counts[route] = self._counts.get(route, 0) + 1

    def knows(self, host: str) -> bool:
        """Whether the host's connection is known."""
        return host in self._hosts

    def goes(self, host: str, route: Route) -> None:
        """Record that the host is reached by this route."""
        self._hosts[host] = route

    def of(self, host: str) -> int | None:
        """Round trips to the host; None if none was logged, since every task needs one."""
        route = self._hosts.get(host)
        if route is None or list(self._hosts.values()).count(route) > 1:
            return None
        return self._counts.get(route)
