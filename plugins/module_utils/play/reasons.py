# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Why hosts could not be reached, and one line for all hosts that say the same. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

UNREACHABLE = "unreachable: "
"""What the reason of a host begins with that Ansible did not reach; then the cause, and after `; ` what was said."""
MOST_NAMED = 8
"""Hosts named in one line; of more than that the first two are."""

_CAUSES = (
    (
        r"could not resolve|name or service not known|nodename nor servname|name resolution|no address associated",
        "cannot resolve",
        "`getent hosts {}` must answer here; else set `ansible_host`",
    ),
    (
        r"host key verification failed|remote host identification",
        "host key not trusted",
        "log in once by hand and compare the key: `ssh {}`",
    ),
    (
        r"permission denied|too many authentication failures",
        "login refused",
        "`ssh {} true` must work; else set `ansible_user` and its key",
    ),
    (r"connection refused", "connection refused", "no ssh server there: see `ansible_host`, `ansible_port`"),
    (r"timed out|timeout", "no answer", "is it up, and does a firewall stop ssh? `ssh {} uptime`"),
    (r"no route to host|network is unreachable", "no route", "see `ansible_host`; a jump host is for `~/.ssh/config`"),
    (
        r"connection (to \S+ )?closed|connection reset|kex_exchange_identification|broken pipe",
        "connection closed",
        "see sshd's log there, or ask fewer at a time: `--forks 10`",
    ),
)
"""What ssh says, the cause in a word or two, and what to do; `{}` is a host's name."""
_ANSIBLES_OWN = re.compile(
    r"^(Task failed: )?(Data could not be sent to remote host \"[^\"]*\"\. "
    r"Make sure this host can be reached over ssh: |Failed to connect to the host via ssh: )?"
)


def why_unreachable(message: str) -> str:
    """The cause, which hosts share, then ssh's own words; or these alone where the cause is not known."""
    words = _ANSIBLES_OWN.sub("", message)
    for pattern, cause, _hint in _CAUSES:
        if re.search(pattern, words, re.IGNORECASE):
            return "%s; %s" % (cause, words)
    return words


def of_result(result: Mapping[str, Any], message: str) -> str:
    """The reason of a host of which Ansible says ``message``."""
    return UNREACHABLE + why_unreachable(message) if result.get("unreachable") else message


@dataclass(frozen=True)
class SameReason:
    """Hosts of one status with one reason."""

    status: str
    reason: str
    hosts: Sequence[str]


def by_reason(entries: Iterable[tuple[str, str, str]]) -> list[SameReason]:
    """Hosts, statuses and reasons as groups, in the order of their first hosts; one without a reason is alone."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    own: dict[str, str] = {}
    for host, status, reason in entries:
        own[host] = reason
        groups.setdefault((status, shared(host, reason), "" if reason else host), []).append(host)
    return [
        SameReason(status, reason if len(hosts) > 1 else own[hosts[0]], hosts)
        for (status, reason, _alone), hosts in groups.items()
    ]


def shared(host: str, reason: str) -> str:
    """The reason without what is the host's own: its name, and what ssh said where the cause is known."""
    for _pattern, known, _hint in _CAUSES:
        before, cause, said = reason.partition(UNREACHABLE + known + "; ")
        if said:
            reason = before + cause[:-2]
    return re.sub(r"(?<![\w.-])%s(?![\w.-])" % re.escape(host), "the node", reason)


def line(group: SameReason, total: int) -> str:
    """`40 of 40 unreachable: cannot resolve (node001, node002, ... 38 more)`."""
    status = "" if group.reason.startswith(UNREACHABLE) else group.status
    words = ": ".join(part for part in (status, group.reason) if part)
    return "%d of %d %s (%s)" % (len(group.hosts), total, words, named(group.hosts))


def named(hosts: Sequence[str]) -> str:
    """All of a few hosts; the first two of many, and how many more."""
    if len(hosts) <= MOST_NAMED:
        return ", ".join(hosts)
    return "%s, ... %d more" % (", ".join(hosts[:2]), len(hosts) - 2)


def hint(group: SameReason) -> str:
    """What to do where the hosts could not be reached; empty where that is not known."""
    cause = group.reason[len(UNREACHABLE) :].partition("; ")[0] if group.reason.startswith(UNREACHABLE) else ""
    return next((words.format(group.hosts[0]) for _pattern, known, words in _CAUSES if known == cause), "")
