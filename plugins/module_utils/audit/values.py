"""Judges variables of the roles without a machine, so that a wrong name or value stops a run before it connects.

``unknown_variables``: names that no role reads, since they begin with a role's name, or are almost a variable of ours.
``value_problems``: what no node can be built with. ``of_variable``: what groups of equal rank set differently.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Collection, Iterable, Mapping, Sequence

from ..array.drive_decisions import chunk_problem, drives_problems, groups_problem, name_problem
from ..array.drive_volumes import ALL
from ..common.io_settings import ARGUMENTS as TUNING
from ..common.raid_levels import DEFAULT, LEVELS, canonical
from ..common.refusal import Refusal
from ..gds.apply import NO_KEY, PUBLIC_KEY, cufile_refusals
from ..health.settings import problems_of as health_problems
from ..job_scratch.settings import problems_of as jobs_problems
from ..machine.file_system import BUILT
from ..memory.limits import memory_problems
from ..tuning.settings import normal_form
from ..units import UnitError, parse_bandwidth, parse_size
from ..volume.volume_values import volume_problems

_ASSUMED_CHUNK = 2**20
_SHOWN = 60
LETTERS = 2
"""Names within so many added, lost, changed or swapped letters of one of ours count as misspelt."""
SHORT = 12
"""Names of fewer letters count only within one: more would be other words."""
_ANSIBLE = ("ansible_", "_")


def value_problems(roles: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Every problem, a line each with its hint. ``roles``: variables by role, by their names without the role's.

    They have the types of the roles' argument_specs. A variable that is missing is not judged.
    """
    program = roles.get("tunetool", {})
    problems = memory_problems(_defaults(roles.get("host_memory", {}), _MEMORY))
    if not program.get("volume"):
        problems = [*_drives_and_volume(roles), *problems, *tuning_problems(roles.get("io_tuning", {}))]
    return [*problems, *_rest(roles, program)]


_MEMORY = {"hugepages": [], "hugepages_max_share": 50, "shm_size": "", "memlock": ""}
_VOLUME = {
    "mount_point": "/mnt/nvme_raid0",
    "mount_options": [],
    "device_timeout": "30s",
    "label": "",
    "offload_dir": "",
    "offload_mode": "1777",
    "services": [],
}


def _defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] if given.get(name) is not None else value for name, value in defaults.items()}


def _drives_and_volume(roles: Mapping[str, Mapping[str, Any]]) -> list[str]:
    drives = _defaults(roles.get("nvme_drives", {}), {"count": 1, "size": "", "serials": []})
    array = _defaults(
        roles.get("raid_array", {}),
        {"name": "nvme_raid0", "chunk": "1MiB", "level": DEFAULT, "groups": ALL, "adopt": False},
    )
    in_chunk = chunk_problem(array["chunk"])
    level = canonical(array["level"])
    chunk = LEVELS[level].chunk(_ASSUMED_CHUNK if in_chunk else parse_size(array["chunk"]))
    log_su = BUILT.geometry(chunk, 1).log_su_bytes
    problems = [*drives_problems(**drives, level=level), name_problem(array["name"]), in_chunk, groups_problem(array)]
    if array["groups"] != ALL:
        problems += _of_several(roles, array["groups"])
    volume = volume_problems(_defaults(roles.get("scratch_filesystem", {}), _VOLUME), log_su)
    return [problem for problem in [*problems, *volume] if problem]


def _of_several(roles: Mapping[str, Mapping[str, Any]], groups: str) -> list[str]:
    """What is made for one volume only."""
    asked = [role + "_enabled" for role in ("ephemeral", "job_scratch") if roles.get(role, {}).get("enabled")]
    return [
        "`%s` and `raid_array_groups: %s`: a node with several volumes does not have it. hint: leave out one"
        % (name, groups)
        for name in asked
    ]


def tuning_problems(given: Mapping[str, Any]) -> list[str]:
    """The problems of each I/O setting, or else of all together."""
    asked = {name: str(given.get(name) or "") for name in TUNING}
    alone = [{**dict.fromkeys(asked, ""), name: value} for name, value in asked.items() if value]
    problems = [problem for problem in map(_tuning_problem, alone) if problem]
    together = None if problems else _tuning_problem(asked)
    return [*problems, together] if together else problems


def _tuning_problem(asked: Mapping[str, str]) -> str | None:
    try:
        normal_form(asked)
    except Refusal as error:
        return str(error)
    return None


def _rest(roles: Mapping[str, Mapping[str, Any]], program: Mapping[str, Any]) -> list[str]:
    problems = []
    for name in ("expect_read", "expect_write"):
        if program.get(name):
            try:
                parse_bandwidth(program[name])
            except UnitError as error:
                problems.append("tunetool_%s: %s. hint: %s" % (name, error.message, error.hint))
    volume = program.get("volume") or ""
    if volume and not volume.startswith("/"):
        problems.append("`tunetool_volume` is `%s`. hint: the mount point, an absolute path" % volume)
    problems += _units_problems(roles, program)
    if not volume:
        problems += _gds_problems(roles.get("gpudirect_storage", {}))
    for role, name in (("node_reboot", "timeout"), ("training_environment", "proof_timeout")):
        seconds = roles.get(role, {}).get(name)
        if seconds is not None and seconds < 1:
            problems.append("`%s_%s` is %d. hint: a number of seconds" % (role, name, seconds))
    return problems


def _units_problems(roles: Mapping[str, Mapping[str, Any]], program: Mapping[str, Any]) -> list[str]:
    """Of the roles whose units call the program."""
    problems = [
        "`%s_enabled` needs the program on the node. hint: set `tunetool_install: true`" % role
        for role in ("ephemeral", "job_scratch", "node_health")
        if roles.get(role, {}).get("enabled") and program.get("install") is False
    ]
    ephemeral, health = roles.get("ephemeral", {}), roles.get("node_health", {})
    if ephemeral.get("enabled"):
        if program.get("volume"):
            problems.append(
                "`ephemeral_enabled` is for an array that is built here, and this node's volume is its owner's. hint: "
                "leave out `ephemeral_enabled` or `tunetool_volume`"
            )
        if (ephemeral.get("wait_seconds") or 0) < 0:
            problems.append("`ephemeral_wait_seconds` is below zero. hint: 30 is enough for local drives")
    jobs = roles.get("job_scratch", {})
    if jobs.get("enabled"):
        mounted = roles.get("scratch_filesystem", {}).get("mount_point") or str(_VOLUME["mount_point"])
        problems += jobs_problems(jobs, program.get("volume") or mounted)
    if health.get("enabled"):
        problems += [*health_problems(health), *_ignored_problems(health.get("ignored_checks") or [])]
    return problems


def _ignored_problems(ignored: Sequence[str]) -> list[str]:
    if not ignored:
        return []
    # The table imports every reader of a node, which a run for a thousand hosts that ignore nothing need not pay.
    from .manifest_checks import ignored_problems  # noqa: PLC0415

    return ignored_problems(ignored)


def _gds_problems(given: Mapping[str, Any]) -> list[str]:
    problems = cufile_refusals(given.get("cufile") or {})
    key = str(given.get("repository_key") or "").strip()
    if not given.get("repository_url"):
        return problems
    if not key:
        problems.append(
            "`gpudirect_storage_repository_url` has no key. hint: `gpudirect_storage_repository_key` is its text, its "
            "path on the control machine or its URL"
        )
    elif not key.startswith(("~", "/", ".", "http://", "https://", PUBLIC_KEY)):
        problems.append(NO_KEY)
    return problems


def unknown_variables(names: Iterable[str], known: Collection[str], prefixes: tuple[str, ...]) -> list[str]:
    """A line for each name that no role reads, though it begins with one of ``prefixes`` or is almost ``known``."""
    problems = []
    for name in sorted(set(names) - set(known)):
        if name.startswith(prefixes):
            near = difflib.get_close_matches(name, sorted(known), n=1)
        else:
            near = [] if name.startswith(_ANSIBLE) else misspelt(name, known)
            if not near:
                continue
        problems.append(
            "`%s` is not a variable of this collection%s" % (name, "; did you mean `%s`?" % near[0] if near else "")
        )
    return problems


def misspelt(name: str, known: Iterable[str]) -> list[str]:
    """The one of ``known`` that ``name`` is a misspelling of, if any."""
    most = LETTERS if len(name) >= SHORT else 1
    near = []
    for other in known:
        # Cheap first: a fleet's variables are compared host by host.
        if abs(len(name) - len(other)) <= most and len(set(name) ^ set(other)) <= 2 * most:
            letters = distance(name, other, most)
            if letters <= most:
                near.append((letters, other))
    return [other for _letters, other in sorted(near)[:1]]


def distance(one: str, other: str, most: int) -> int:
    """Letters to add, drop, change or swap with the next one, to get from a name to another; above ``most``: any number
    above it."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for at, letter in enumerate(one, start=1):
        last, before, row = before, row, [at]
        for to, wanted in enumerate(other, start=1):
            cost = min(before[to] + 1, row[to - 1] + 1, before[to - 1] + (letter != wanted))
            if at > 1 and to > 1 and letter == other[to - 2] and one[at - 2] == wanted:
                cost = min(cost, last[to - 2] + 1)
            row.append(cost)
        if min(row) > most and min(before) > most:
            return most + 1
    return row[-1]


@dataclass(frozen=True)
class Setting:
    """A group that sets a variable."""

    group: str
    rank: tuple[int, int]
    """Its depth in the inventory and its ``ansible_group_priority``: the higher one wins."""
    value: Any
    place: str
    """The file, with its line where that is known; empty if nobody knows."""


def conflict(name: str, settings: Sequence[Setting]) -> str | None:
    """The line about a variable that groups of equal rank set differently, where no group of a higher rank sets it."""
    most = max((setting.rank for setting in settings), default=None)
    winners = [setting for setting in settings if setting.rank == most]
    other = next((each for each in winners if each.value != winners[0].value), None)
    if other is None:
        return None
    return (
        "`%s` is %s and %s, and only the alphabet decides between them. hint: set it in one of them or in host_vars, "
        "or give one of them a higher `ansible_group_priority`" % (name, _shown(winners[0]), _shown(other))
    )


def _shown(setting: Setting) -> str:
    text = setting.value if isinstance(setting.value, str) else repr(setting.value)
    text = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
    where = " (`%s`)" % setting.place if setting.place else ""
    return "`%s` in group `%s`%s" % (text, setting.group, where)


def of_variable(name: str, layers: Sequence[Sequence[Setting]], host_values: Collection[str]) -> str | None:
    """The line about a variable, if there is one.

    ``layers``: who sets it in the inventory's own files, in its group_vars, and in those beside the playbook: a later
    layer wins whatever its groups are. ``host_values``: what is set for the host alone, which wins over all.
    """
    if name in host_values:
        return None
    setting = [layer for layer in layers if layer]
    return conflict(name, setting[-1]) if setting else None
