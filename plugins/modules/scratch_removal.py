#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: remove the scratch volume under an applied plan, finally or to build it again with another drive."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: scratch_removal
short_description: Remove the scratch volume under an applied plan, and leave its drives blank
version_added: "0.1.0"
description:
  - Finds the volume by the manifest, else by its array's name on the drives; the array may be mounted, stopped, broken
    or without one of its members.
  - Refuses, with nothing touched, a volume that anybody uses, members that hold something else than the manifest
    says, and anything that O(wipes) and O(volume) do not name as it is now.
  - Then unmounts it, removes every label from the file system, the array and the drives, and removes its traces. After
    a power cut, the next run continues; a drive that is blank already needs no consent.
  - Where there is neither a volume nor a manifest, V(teardown) removes the health check and what makes
    directories of jobs, which needs no plan.
  - Of an array that has its data a second time (RAID1, RAID10), V(replace) removes nothing. It takes the old drive out
    if it is still there, adds the new one, which md fills while the volume serves, and writes the new members into the
    manifest. It refuses where the members that are left do not have all of the data. It needs a plan only for a new
    drive that holds something.
  - Where each drive has a volume, V(teardown) removes all of them, and V(replace) the one of the old drive. The others
    keep their data, and stay mounted.
  - Data blocks stay on the drives, unless O(erase) is asked for.
options:
  job:
    description:
      - V(teardown) also removes the drop-ins, the health check, what makes directories of jobs, the line in mdadm.conf,
        the mount point and the manifest, and rebuilds the initramfs. V(replace) keeps those for the array that is to be
        built next, and first makes sure that it can be built.
    type: str
    choices: [teardown, replace]
    required: true
  array:
    description:
      - The variables of the role P(tunetool.node.raid_array#role) without its name; C(name) is required. Where there is
        no manifest, the array is found by it; C(chunk) is that of the array that is to be built, for O(wishes).
    type: dict
    required: true
  mount_point:
    description: Mount point, where there is no manifest.
    type: path
    required: true
  settings:
    description:
      - For V(replace), the variables of the role P(tunetool.node.replace_drive#role) without its name. The old drive
        may be absent; the new one must be blank, or named in O(wipes).
    type: dict
  drives:
    description:
      - For V(replace), the variables of the role P(tunetool.node.nvme_drives#role) without its name; C(count) is
        required.
    type: dict
  wishes:
    description: As of M(tunetool.node.nvme_drives), for V(replace); what would stop the build stops the removal.
    type: dict
    default: {}
  plan:
    description: Change nothing, do not fail because of what is found, and return the host's part of a plan.
    type: bool
    default: false
  erase:
    description:
      - For V(teardown), what becomes of the data blocks of the drives that the plan names. V(none) leaves them;
        V(discard) discards them; V(crypto) lets each drive throw its key away. A drive that cannot is refused, with
        nothing changed. The plan names it, and is applied with the same.
    type: str
    choices: [none, discard, crypto]
    default: none
  program:
    description: Path of the program; a starter of the health check lies beside it.
    type: path
    default: /opt/tunetool/bin/tunetool
  volume:
    description: The volume that may be lost, from an applied plan.
    type: dict
    suboptions:
      uuid:
        description: UUID of the array.
        type: str
      hash:
        description: Hash of the array's contents; left out if the array did not run.
        type: str
      erase:
        description: What the plan says of O(erase).
        type: str
extends_documentation_fragment: [tunetool.node.changes, tunetool.node.wipes]
author:
  - The tunetool authors (@tunetool)
attributes:
  diff_mode:
    description: Shows the volume, the drives and every file before and after.
    support: full
"""

EXAMPLES = r"""
- name: Return the drives blank
  tunetool.node.scratch_removal:
    job: teardown
    array:
      name: nvme_raid0
    mount_point: /mnt/nvme_raid0
    wipes: "{{ apply_plan | tunetool.node.plan_wipes(inventory_hostname, 'teardown') }}"
    volume: "{{ apply_plan | tunetool.node.plan_volume(inventory_hostname, 'teardown') }}"
"""

RETURN = r"""
wiped:
  description: Serial numbers of the drives that lost (or would lose) what they held.
  returned: success
  type: list
  elements: str
serials:
  description: With V(replace), the members of the array that is to be built.
  returned: success
  type: list
  elements: str
plan:
  description: The host's part of a plan file.
  returned: when O(plan)
  type: dict
msg:
  description: The present state, if there is nothing to do; with O(plan), what would be lost.
  returned: when nothing is removed
  type: str
table:
  description: Every drive with its verdict and the reason.
  returned: success
  type: str
"""

from dataclasses import replace  # noqa: E402  (Ansible wants the documentation first)
from typing import Any, Mapping  # noqa: E402

from ..module_utils.array.drive_decisions import ARRAY, DRIVES, criteria_of, table  # noqa: E402
from ..module_utils.array.drive_volumes import NUMA  # noqa: E402
from ..module_utils.array.numa_volumes import found_volumes  # noqa: E402
from ..module_utils.audit.before_changes import WISHES, not_writable, obstacles  # noqa: E402
from ..module_utils.common.drift import Ledger  # noqa: E402
from ..module_utils.common.manifest import ManifestError  # noqa: E402
from ..module_utils.common.refusal import Refusal  # noqa: E402
from ..module_utils.plan.plan_file import APPLYING, PLANNING, REPLACE, TEARDOWN  # noqa: E402
from ..module_utils.play.convergence import AnsibleModule, Words, change, line_of  # noqa: E402
from ..module_utils.removal import erasure  # noqa: E402
from ..module_utils.removal.apply import Job, names_of_remains, remove_remains  # noqa: E402
from ..module_utils.removal.decision import (  # noqa: E402
    Machine,
    Removal,
    consent_problem,
    plan_removal,
    removal_part,
)
from ..module_utils.removal.drives import plan_several  # noqa: E402
from ..module_utils.removal.exchange import Exchange, carry_out, exchange_part, plan_exchange  # noqa: E402
from ..module_utils.removal.facts import describe, look  # noqa: E402
from ..module_utils.removal.replacement import Swap, plan_replacement  # noqa: E402
from ..module_utils.removal.wipe_drives import WIPES  # noqa: E402
from ..module_utils.units import UnitError, parse_size  # noqa: E402

SETTINGS: dict[str, Any] = {
    "old_serial": {"type": "str", "required": True},
    "new_serial": {"type": "str", "required": True},
}


def buildable(removal: Removal, wanted: dict[str, Any], level: str) -> Removal:
    """With everything as a problem that would stop the build of the next volume, once this one is gone."""
    wishes = dict(wanted["wishes"])
    if removal.problems or removal.done or not any(wishes.values()):
        return removal
    if wishes.get("filesystem"):
        wishes["filesystem"] = dict(wishes["filesystem"], chunk_bytes=parse_size(wanted["array"]["chunk"]))
    found = obstacles(wanted["mount_point"], wishes, removal.serials, removed=True, level=level)
    return replace(removal, problems=tuple("%s; nothing was changed" % each for each in found))


def with_erasure(removal: Removal, wish: str) -> Removal:
    """With how each member is erased, and as a problem each that cannot be."""
    ways, problems = erasure.decide(removal.members, wish)
    return replace(removal, erase=wish, ways=tuple(ways), problems=(*removal.problems, *problems))


def with_found(machine: Machine, array: Mapping[str, Any]) -> Machine:
    """With the several volumes that only their arrays' names tell: nothing is known of them on this system."""
    if machine.manifest is not None or machine.volumes or array["groups"] != NUMA:
        return machine
    serials = {drive.name: drive.serial for drive in machine.drives}
    return replace(machine, volumes=found_volumes(machine.superblocks, serials, array["name"]))


def converge(module: AnsibleModule) -> dict[str, Any]:
    """Do the whole job. Returns the module's result. Raises ``Refusal``."""
    wanted: dict[str, Any] = module.params
    name, point = wanted["array"]["name"], wanted["mount_point"]
    if wanted["job"] == TEARDOWN:
        erasure.await_sanitizing(wanted["erase"], [entry["serial"] for entry in wanted["wipes"]])
        machine = with_found(look()[0], wanted["array"])
        removal = plan_several(machine, point) if machine.volumes else plan_removal(machine, name, point)
        return remove(module, with_erasure(removal, wanted["erase"]))
    machine, hashes = look(wanted["new_serial"])
    machine = with_found(machine, wanted["array"])
    swap = Swap(wanted["old_serial"], wanted["new_serial"], criteria_of(wanted["drives"]), hashes)
    kept = plan_exchange(machine, swap)
    if kept is not None:
        return exchange(module, kept, machine.manifest or {})
    return remove(module, buildable(plan_replacement(machine, name, point, swap), wanted, machine.level))


def remove(module: AnsibleModule, removal: Removal) -> dict[str, Any]:
    """Remove the volume. Returns the module's result. Raises ``Refusal``."""
    wanted: dict[str, Any] = module.params
    answer: dict[str, Any] = {"table": table(removal.decisions), "serials": list(removal.serials), "changed": False}
    job = None
    remains: list[dict[str, str]] = []
    if removal.done and wanted["job"] == TEARDOWN:
        remains = remove_remains(wanted["program"], acting=False)
    if remains:
        removal = replace(removal, note="nothing to remove but %s" % names_of_remains())
    ledger = Ledger(None, not module.check_mode, module.change_begins)
    if removal.volume:
        job = Job(removal, removal.volume, wanted["job"], wanted["program"], ledger)
    if wanted["plan"]:
        text = describe(removal, job.occupants() if job else [])
        return dict(answer, wiped=[], plan=removal_part(removal, text), msg="%s\n%s" % (answer["table"], text))
    if removal.problems:
        raise Refusal("; ".join(removal.problems), *answer["table"].splitlines())
    if removal.done or job is None:
        if remains and not module.check_mode:
            remains = remove_remains(wanted["program"], acting=True)
        return dict(answer, wiped=[], msg=removal.note, changed=bool(remains), diff=remains)
    job.refuse_if_busy()
    allowed = {entry["serial"]: entry["hash"] for entry in wanted["wipes"]}
    problem = consent_problem(removal, allowed, wanted["volume"])
    if problem:
        raise Refusal(
            "%s. hint: nothing was changed; `%s`, read it, then `%s`"
            % (problem, PLANNING[wanted["job"]], APPLYING[wanted["job"]])
        )
    closed = not_writable()
    if closed:
        raise Refusal("; ".join(closed))
    job.run(allowed)
    for warning in ledger.warnings:
        module.warn(warning)
    return dict(answer, changed=bool(ledger.diff), wiped=job.wiped, diff=ledger.diff)


def exchange(module: AnsibleModule, kept: Exchange, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Exchange a member without loss. Returns the module's result. Raises ``Refusal``."""
    wanted: dict[str, Any] = module.params
    answer: dict[str, Any] = {"table": table(kept.decisions), "changed": False, "wiped": []}
    if wanted["plan"]:
        text = "refused: %s" % "; ".join(kept.problems) if kept.problems else kept.note
        part = exchange_part(kept, text)
        return dict(answer, serials=list(kept.serials), plan=part, msg="%s\n%s" % (answer["table"], text))
    if kept.problems:
        raise Refusal("; ".join(kept.problems), *answer["table"].splitlines())
    allowed = {entry["serial"]: entry["hash"] for entry in wanted["wipes"]}
    unnamed = [serial for serial, digest in (kept.hashes or {}).items() if allowed.get(serial) != digest]
    if unnamed:
        raise Refusal(
            "`%s` holds something, and no plan names it as it is now. hint: nothing was changed; `%s`, read it, then "
            "`%s`" % (unnamed[0], PLANNING[REPLACE], APPLYING[REPLACE])
        )
    closed = not_writable()
    if closed:
        raise Refusal("; ".join(closed))
    ledger = Ledger(None, not module.check_mode, module.change_begins)
    serials = carry_out(kept, manifest, allowed, ledger)
    for warning in ledger.warnings:
        module.warn(warning)
    return dict(
        answer,
        serials=serials,
        changed=bool(ledger.diff),
        wiped=[*(kept.hashes or {})],
        diff=ledger.diff,
        msg=kept.note,
    )


def main() -> None:
    """Entry point: check, refuse or remove, report."""
    module = AnsibleModule(
        argument_spec={
            "job": {"type": "str", "choices": [TEARDOWN, REPLACE], "required": True},
            "array": {"type": "dict", "required": True, "options": ARRAY},
            "mount_point": {"type": "path", "required": True},
            "settings": {"type": "dict", "options": SETTINGS},
            "drives": {"type": "dict", "options": DRIVES},
            "plan": {"type": "bool", "default": False},
            "wishes": WISHES,
            "program": {"type": "path", "default": "/opt/tunetool/bin/tunetool"},
            "wipes": WIPES,
            "erase": erasure.ERASE,
            "volume": {"type": "dict", "options": {name: {"type": "str"} for name in ("uuid", "hash", "erase")}},
        },
        required_if=[("job", REPLACE, ["settings", "drives"])],
        supports_check_mode=True,
    )
    words: Words = {
        ManifestError: lambda error: (
            "%s. hint: nothing was changed; repair it with `tunetool provision`, or move it away: the array is then "
            "found by its name" % error.message
        ),
        UnitError: lambda error: "nvme_drives_size: %s" % line_of(error),
        OSError: lambda error: (
            "`%s`: %s. hint: repair that, then run the playbook again with the same plan: it goes on"
            % (error.filename or module.params["mount_point"], error.strerror or error)
        ),
    }
    module.exit_json(**change(module, lambda: converge(module), words))


if __name__ == "__main__":
    main()
