"""The plan file: what each host would lose; the owner applies it before anything is lost."""

from __future__ import annotations

import hashlib
import json
import re
from datetime import datetime, timezone
from typing import Any, Mapping, Sequence

from ..array.drive_decisions import REFUSE, WIPE, Decision
from ..array.drive_selection import Selection
from ..common import documents
from ..common.refusal import on_one_line

SCHEMA_NAME = "tunetool.plan/1"
PROVISION, TEARDOWN, REPLACE = "provision", "teardown", "replace"
ARRAY_ACTIONS = {
    PROVISION: ("create", "keep", "adopt", "refuse"),
    TEARDOWN: ("remove", "nothing", "refuse"),
    REPLACE: ("remove", "nothing", "refuse"),
}
"""Possible actions on a host's array, by the plan's job."""
COMMANDS = {
    PROVISION: "tunetool provision",
    TEARDOWN: "ansible-playbook tunetool.node.teardown",
    REPLACE: "ansible-playbook tunetool.node.replace_drive",
}
PLANNING = {
    PROVISION: COMMANDS[PROVISION] + " --plan plan.json",
    TEARDOWN: COMMANDS[TEARDOWN] + " --tags plan -e plan_file=plan.json",
    REPLACE: COMMANDS[REPLACE] + " --tags plan -e plan_file=plan.json",
}
"""Calls that make a plan, by its job."""
APPLYING = {
    PROVISION: COMMANDS[PROVISION] + " --apply plan.json",
    TEARDOWN: COMMANDS[TEARDOWN] + " -e apply_plan=plan.json",
    REPLACE: COMMANDS[REPLACE] + " -e apply_plan=plan.json",
}
"""Calls that apply it, by its job."""
_HASH = re.compile(r"^[0-9a-f]{64}$")


class PlanError(Exception):
    """A plan file that must not be applied."""

    def __init__(self, message: str, hint: str) -> None:
        self.message = on_one_line(message)
        self.hint = on_one_line(hint)
        super().__init__("%s. hint: %s" % (self.message, self.hint))


def _again(job: str) -> str:
    return "make a new one: `%s`" % PLANNING[job]


def _forged(plan: Mapping[str, Any], host: str) -> PlanError:
    message = "the plan's entry for `%s` is not one that was written by a plan" % host
    return PlanError(message, _again(plan.get("job", PROVISION)))


def host_part(
    selection: Selection,
    holds: Mapping[str, Sequence[str]],
    hashes: Mapping[str, str],
    array_action: str,
    array_reason: str,
) -> dict[str, Any]:
    """One host's part. A host whose array is refused has no drive to wipe."""
    drives = []
    for row in selection.decisions:
        refused = row.verdict == WIPE and array_action == "refuse"
        action = REFUSE if refused else row.verdict
        drives.append(drive_part(row, action, holds.get(row.drive.name, ()), hashes.get(row.drive.name)))
    return {"drives": drives, "array_action": array_action, "array_reason": array_reason}


def drive_part(decision: Decision, action: str, holds: Sequence[str], contents_hash: str | None) -> dict[str, Any]:
    """One drive of a host's part."""
    drive = decision.drive
    return {
        "serial": drive.serial,
        "model": drive.model,
        "size_bytes": drive.size_bytes,
        "action": action,
        "reason": decision.reason,
        "holds": list(holds),
        "hash": contents_hash,
    }


def document(
    hosts: Mapping[str, Mapping[str, Any]], tool_version: str, now: datetime | None = None, job: str = PROVISION
) -> dict[str, Any]:
    """The plan over all hosts, sealed."""
    created = (now or datetime.now(timezone.utc)).strftime("%Y-%m-%dT%H:%M:%SZ")
    plan = {"schema": SCHEMA_NAME, "job": job, "created": created, "tool_version": tool_version, "hosts": dict(hosts)}
    return dict(plan, sha256=seal(plan))


def seal(plan: Mapping[str, Any]) -> str:
    """sha256 over the canonical JSON without the key itself. It detects accidental changes and edits; it is not a
    signature."""
    bare = {key: value for key, value in plan.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(bare, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def dump(plan: Mapping[str, Any]) -> str:
    """The file's text."""
    return json.dumps(plan, indent=2, sort_keys=True) + "\n"


def load(path: str, job: str = PROVISION) -> dict[str, Any]:
    """Read and check a plan file for ``job``. Raises ``PlanError``."""
    try:
        text = documents.read_bytes(path).decode("utf-8")
    except OSError as error:
        raise PlanError("plan file `%s` cannot be read: %s" % (path, error.strerror), _again(job)) from error
    except UnicodeDecodeError:
        raise PlanError("`%s` is not a plan file: it is not UTF-8" % path, _again(job)) from None
    return parse(text, path, job)


def parse(text: str, name: str, job: str = PROVISION) -> dict[str, Any]:
    """A plan for ``job`` from its text; ``name`` is for messages. Raises ``PlanError``."""
    try:
        plan = documents.parse(text)
    except ValueError as error:
        raise PlanError("`%s` is not a plan file: it is not JSON (%s)" % (name, error), _again(job)) from None
    if not isinstance(plan, dict) or plan.get("schema") != SCHEMA_NAME:
        schema = plan.get("schema") if isinstance(plan, dict) else None
        raise PlanError(
            "`%s` is not a plan file: expected schema `%s`, found `%s`" % (name, SCHEMA_NAME, schema), _again(job)
        )
    if plan.get("sha256") != seal(plan):
        raise PlanError("plan file `%s` was edited after it was written" % name, _again(job))
    if not isinstance(plan.get("job"), str) or plan["job"] not in ARRAY_ACTIONS:
        raise PlanError("plan file `%s` is for no job of this version: `%s`" % (name, plan.get("job")), _again(job))
    if plan["job"] != job:
        raise PlanError(
            "plan file `%s` is for `%s`, not for `%s`" % (name, COMMANDS[plan["job"]], COMMANDS[job]),
            "apply it with `%s`, or make a new one" % COMMANDS[plan["job"]],
        )
    if not isinstance(plan.get("hosts"), dict):
        raise PlanError("plan file `%s` names no hosts" % name, _again(job))
    for host in plan["hosts"]:
        wipes(plan, host)
        volume(plan, host)
    return plan


def wipes(plan: Mapping[str, Any], host: str) -> list[dict[str, str]]:
    """The drives that this host may lose: serial and hash of each. Empty for a host that the plan does not name."""
    part = plan["hosts"].get(host)
    if part is None:
        return []
    try:
        chosen = [drive for drive in part["drives"] if drive["action"] == WIPE]
        allowed = [{"serial": drive["serial"], "hash": drive["hash"]} for drive in chosen]
        good = all(
            isinstance(entry["serial"], str) and entry["serial"] and _HASH.match(entry["hash"]) for entry in allowed
        )
        good = good and part["array_action"] in ARRAY_ACTIONS[plan.get("job", PROVISION)]
    except (KeyError, TypeError):
        good, allowed = False, []
    if not good or len({entry["serial"] for entry in allowed}) != len(allowed):
        raise _forged(plan, host)
    return allowed


def volume(plan: Mapping[str, Any], host: str) -> dict[str, Any]:
    """The volume that this host may lose: the array's UUID, the hash of its contents, and how its drives are erased.

    Empty for none.
    """
    part = plan["hosts"].get(host)
    if part is None or part["array_action"] != "remove":
        return {}
    try:
        # A plan of an older version erases nothing.
        erase = part["volume"].get("erase", "none")
        allowed = {"uuid": part["volume"]["uuid"], "hash": part["volume"]["hash"], "erase": erase}
        good = bool(allowed["uuid"]) and (allowed["hash"] is None or bool(_HASH.match(allowed["hash"])))
    except (AttributeError, KeyError, TypeError):
        good, allowed = False, {}
    if not good:
        raise _forged(plan, host)
    return allowed
