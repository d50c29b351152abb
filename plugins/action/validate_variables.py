# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Check every role's variables on the control machine, before a node is touched."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.action import ActionBase
from ansible.vars.plugins import get_vars_from_inventory_sources, get_vars_from_path

from ..module_utils.audit.values import Setting, of_variable, unknown_variables, value_problems
from ..module_utils.common.refusal import Refusal
from ..module_utils.gds.apply import NO_KEY, PUBLIC_KEY
from ..module_utils.plan.plan_file import PROVISION, REPLACE, TEARDOWN, PlanError, load
from ..module_utils.training import wheel_files
from ..plugin_utils.role_specs import role_options

SIZE = re.compile(r"^([1-9]\d*|([1-9]\d?|100)%)$")
SHARE = re.compile(r"^(\d{1,2}(\.\d+)?|100)%?$")
RESULT = "result"
"""Every role sets ``<role>_result``, which is not a variable for the inventory."""

PLAY_VARIABLES = frozenset(
    {
        "apply_plan",
        "plan_file",
        "provision_job",
        "provision_max_fail_percentage",
        "provision_serial",
        "tunetool_address",
        "tunetool_slots",
        "verify_allow_busy",
        "verify_duration",
        "verify_expect",
        "verify_judge",
        "verify_level",
        "verify_python",
        "verify_require",
        "verify_target",
    }
)
"""Variables of plan.yml, provision.yml, verify.yml and of launches, which have no role to document them."""

VARIABLES_HINT = ". hint: `ansible-doc -t role tunetool.node.ROLE` lists the variables of a role"

_VOLUME = ("drives", "array", "filesystem")
NEEDS = {
    "array": ("drives",),
    "filesystem": ("drives", "array"),
    "tunetool": (*_VOLUME, "memory", "tuning", "gds", "reboot"),
}
"""Parts of provision.yml, by tag, that use in the same run what others answered: no host keeps that."""
WITHOUT_BUILD = (*_VOLUME, "tuning", "gds")
"""Parts that leave out a volume that its owner built."""

FEWEST_GROUPS = 2
"""Fewer groups cannot differ."""

ROLE_OF_JOB = {REPLACE: "replace_drive"}
"""The role whose required variables this job needs; no other job uses them."""


def names_problems(names: list[str], options: dict[str, dict[str, Any]]) -> list[str]:
    """One line for each name that is almost one of this collection's variables, or begins like them."""
    known = {name for variables in options.values() for name in variables} | PLAY_VARIABLES
    results = {f"{role}_{RESULT}" for role in options} | {f"verify_{RESULT}"}
    prefixes = tuple(f"{role}_" for role in options) + ("provision_", "verify_")
    return unknown_variables(set(names) - results, known, prefixes)


def batch_problem(variables: dict[str, Any]) -> str | None:
    """Problems of the batch variables, for which Ansible itself would print a traceback."""
    serial, most = variables.get("provision_serial"), variables.get("provision_max_fail_percentage")
    for size in serial if isinstance(serial, list) else [] if serial is None else [serial]:
        if not SIZE.match(str(size)):
            return f"`provision_serial` has `{size}`. hint: a number of hosts from 1 on, a share such as 25%, or a list"
    if serial == []:
        return "`provision_serial` is an empty list. hint: leave it out for all hosts at once"
    if most is not None and not SHARE.match(str(most)):
        return f"`provision_max_fail_percentage` is `{most}`. hint: a number from 0 to 100"
    return None


def typed(spec: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The values of a role with the types of its spec, and its defaults; those that have another type are left out."""
    values = {}
    for name, option in spec.items():
        validation = ArgumentSpecValidator({name: option}).validate({name: given[name]} if name in given else {})
        value = validation.validated_parameters.get(name)
        # Some defaults are templates over other variables.
        if not validation.error_messages and not (name not in given and "{{" in str(value)):
            values[name] = value
    return values


def without_required(spec: dict[str, Any]) -> dict[str, Any]:
    """Options of a role that does not run, without its required ones."""
    return {name: {key: value for key, value in option.items() if key != "required"} for name, option in spec.items()}


def hosts_problem(hosts: list[str], job: str) -> str | None:
    """Problem of a replacement on several hosts: the serials belong to one host."""
    if job == REPLACE and len(hosts) != 1:
        return f"a drive is replaced on one host, not on {len(hosts)}. hint: `--limit {hosts[0] if hosts else 'HOST'}`"
    return None


def plan_problem(variables: dict[str, Any], job: str | None) -> str | None:
    """Problems of the given plan. ``job``: None if the run changes nothing."""
    if "plan_file" in variables and "apply_plan" in variables:
        return "`plan_file` and `apply_plan` do not go together. hint: make the plan, read it, then apply it"
    if job and "plan_file" in variables and "plan" not in variables.get("ansible_run_tags", ()):
        what = "build the nodes" if job == PROVISION else "change the nodes"
        return f"`plan_file` without `--tags plan` would {what}. hint: add `--tags plan`"
    path = variables.get("apply_plan")
    if path is None:
        return None
    try:
        load(str(path), job or PROVISION)
    except PlanError as error:
        return str(error)
    return None


def tags_problem(variables: dict[str, Any]) -> str | None:
    """Problems of ``--tags`` and ``--skip-tags``: a part that runs without those whose answers it uses."""
    asked, skipped = set(variables.get("ansible_run_tags") or ["all"]), set(variables.get("ansible_skip_tags") or ())

    def runs(tag: str) -> bool:
        return bool(asked & {"all", "tagged", PROVISION, tag}) and not skipped & {"tagged", PROVISION, tag}

    left_out = WITHOUT_BUILD if variables.get("tunetool_volume") else ()
    for tag, parts in NEEDS.items():
        needed = tuple(each for each in parts if each not in left_out)
        missing = [each for each in needed if not runs(each)]
        if runs(tag) and tag not in left_out and missing:
            names = ", ".join(f"`{each}`" for each in missing)
            return (
                f"the part `{tag}` needs what {names} answer in the same run. hint: `--tags {','.join((*needed, tag))}`"
            )
    return None


def control_problems(roles: dict[str, dict[str, Any]]) -> list[str]:
    """What is asked for and the control machine lacks, which a role would notice once drives were written."""
    training, gds = roles.get("training_environment", {}), roles.get("gpudirect_storage", {})
    problems = []
    if training.get("enabled") and training.get("wheelhouse") and not training.get("python"):
        try:
            wheel_files.read(str(training["wheelhouse"]))
        except Refusal as error:
            problems.append(f"`training_environment_wheelhouse`: {error}")
    key = str(gds.get("repository_key") or "")
    # A relative path is looked for in several directories.
    if gds.get("repository_url") and key.startswith(("/", "~")) and "\n" not in key:
        try:
            text = Path(key).expanduser().read_text(errors="replace")
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            problems.append(
                f"`gpudirect_storage_repository_key`: `{key}`: {reason}. hint: the path of a key's file here"
            )
        else:
            problems += [] if text.lstrip().startswith(PUBLIC_KEY) else [NO_KEY]
    return problems


def group_problems(variables: dict[str, Any], known: set[str], loader: DataLoader) -> list[str]:
    """A line for each of our variables that groups of this host set differently, none of them before the others."""
    hosts = variables["hostvars"]
    inventory, manager = getattr(hosts, "_inventory", None), getattr(hosts, "_variable_manager", None)
    host = inventory.get_host(variables["inventory_hostname"]) if inventory is not None else None
    groups = [group for group in host.get_groups() if group.name != "all"] if host is not None else []
    if inventory is None or host is None or len(groups) < FEWEST_GROUPS:
        return []
    sources, beside = inventory._sources, loader.get_basedir()

    def plugins(entity: Any) -> list[dict[str, Any]]:
        """The variables of a group or a host: from the inventory's text, beside the inventory, beside the playbook."""
        return [
            entity.vars,
            get_vars_from_inventory_sources(loader, sources, [entity], "task"),
            get_vars_from_path(loader, beside, [entity], "task"),
        ]

    alone = {name for layer in plugins(host) for name in layer} | set(getattr(manager, "extra_vars", {}))
    by_group = {group.name: plugins(group) for group in groups}
    problems = []
    for name in sorted(known):
        layers = [
            [
                Setting(group.name, (group.depth, group.priority), values[name], place_of(values[name]))
                for group in groups
                for values in [by_group[group.name][index]]
                if name in values
            ]
            for index in range(3)
        ]
        problems += [line] if (line := of_variable(name, layers, alone)) else []
    return problems


def place_of(value: Any) -> str:
    """The file and the line that a value comes from, where this Ansible keeps that."""
    try:
        from ansible._internal._datatag._tags import Origin  # noqa: PLC0415  (older ones have none)
    except ImportError:
        return ""
    origin = Origin.get_tag(value)
    if origin is None or not origin.path:
        return ""
    return f"{origin.path}:{origin.line_num}" if origin.line_num else str(origin.path)


class ActionModule(ActionBase):  # type: ignore[misc]  # Ansible ships no types
    """Validates; never connects."""

    TRANSFERS_FILES = False
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return ok, or a failure with one line per problem."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = dict(task_vars or {})
        for name in ("apply_plan", "plan_file", "tunetool_volume", "provision_serial", "provision_max_fail_percentage"):
            if name in variables:
                variables[name] = self._templar.template(variables[name])
        job = self._task.args.get("job")
        options = role_options()
        problems = names_problems([str(name) for name in variables], options)
        roles = {}
        for role, spec in options.items():
            given = {}
            for name in spec:
                if name not in variables:
                    continue
                try:
                    given[name] = self._templar.template(variables[name])
                except AnsibleError as error:
                    problems.append(f"`{name}` cannot be evaluated: {error}")
            runs = role not in ROLE_OF_JOB.values() or ROLE_OF_JOB.get(job) == role
            used = spec if runs else without_required(spec)
            validation = ArgumentSpecValidator(used).validate(given)
            problems += [f"role {role}: {message}" for message in validation.error_messages]
            roles[role] = {name[len(role) + 1 :]: value for name, value in typed(used, given).items()}
        if problems:
            problems[-1] += VARIABLES_HINT
        if job != TEARDOWN:
            # What can no longer be built can still be taken down.
            problems += [*value_problems(roles), *control_problems(roles)]
            known = {name for spec in options.values() for name in spec} | PLAY_VARIABLES
            problems += group_problems(variables, known, self._loader)
        hosts = [str(host) for host in variables["ansible_play_hosts_all"]]
        others = (
            batch_problem(variables),
            hosts_problem(hosts, job),
            plan_problem(variables, job),
            tags_problem(variables) if job == PROVISION else None,
        )
        problems += [problem for problem in others if problem]
        if problems:
            result["failed"] = True
            result["msg"] = refusal(problems)
        result["changed"] = False
        return result


def refusal(problems: list[str]) -> str:
    """All problems as one message; its first line has a hint, by which the end of the run knows a refusal."""
    if len(problems) == 1:
        hint = "" if ". hint: " in problems[0] else VARIABLES_HINT
        return f"{problems[0]}{hint}; nothing was changed"
    lines = "\n".join(problems)
    return f"{len(problems)} variables cannot be used. hint: each line below has its cure; nothing was changed\n{lines}"
