#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: write the manifest of what was built, then check the node against it."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: node_manifest
short_description: Write /etc/tunetool/node.json and check the node against it
version_added: "0.1.0"
description:
  - Writes what was built, by serial and UUID, atomically and last, so that a run that was cut leaves no manifest of
    something that does not exist.
  - A manifest that is damaged is replaced, with a warning that says what was wrong with it. One of a newer version is
    left as it is, and the module fails.
  - Then runs the configuration checks of C(tunetool verify --level config) and fails with those that do not hold.
options:
  settings:
    description:
      - The variables of the role P(tunetool.node.tunetool#role) without its name, and without those of the
        program; C(profile) is required.
      - C(volume) is only described and checked; O(array), O(members) and O(filesystem) are left out then. It is refused
        where nothing is mounted there, and on a node whose manifest has an array that was built.
      - The block of C(tuned) for this node's hardware is written to C(/etc/tunetool/aio.json); where there is none,
        that file is removed.
    type: dict
    required: true
  array:
    description: RV(array) as tunetool.node.raid_array returned it.
    type: dict
  members:
    description: The selected drives as tunetool.node.nvme_drives returned them.
    type: list
    elements: dict
  filesystem:
    description: RV(filesystem) as tunetool.node.scratch_filesystem returned it.
    type: dict
  volumes:
    description:
      - RV(volumes) as tunetool.node.scratch_filesystem returned it, in place of O(array), O(members) and O(filesystem)
        where it is not empty.
      - One with C(left) is broken. It is written as it was, is not checked, and a warning names it.
    type: list
    elements: dict
    default: []
  memory:
    description: RV(memory) as tunetool.node.host_memory returned it; left out where it was not called.
    type: dict
  gds:
    description: RV(gds) as tunetool.node.gpudirect_storage returned it; left out where it was not called.
    type: dict
  tuning:
    description: RV(tuning) as tunetool.node.io_tuning returned it; empty where nothing is tuned.
    type: dict
    default: {}
  offload_dir:
    description: The offload directory; empty for none.
    type: str
    default: ""
  offload:
    description:
      - RV(offload) as tunetool.node.scratch_filesystem returned it; empty without a directory.
    type: dict
    default: {}
  reboot_reasons:
    description:
      - Settings that take effect only after a reboot. Any of them makes C(reboot_required) true in the manifest;
        checks that wait for the reboot warn instead of failing this module.
    type: list
    elements: str
    default: []
  keep_training:
    description:
      - Keep the part C(training) of the manifest that is there, which M(tunetool.node.training_environment) writes;
        else it is left out.
    type: bool
    default: false
  tool_version:
    description: Version of the collection that built the node.
    type: str
    required: true
author:
  - The tunetool authors (@tunetool)
attributes:
  check_mode:
    description: Says whether the manifest would change; runs no checks on what is not built yet.
    support: full
  diff_mode:
    description: Shows the manifest before and after.
    support: full
"""

EXAMPLES = r"""
- name: Write the manifest
  tunetool.node.node_manifest:
    array: "{{ raid_array_result.array }}"
    members: "{{ nvme_drives_result.selected }}"
    filesystem: "{{ scratch_filesystem_result.filesystem }}"
    memory: "{{ host_memory_result.memory }}"
    tool_version: 0.1.0
    settings:
      profile: h100
      expect_read: 50GBps
"""

RETURN = r"""
differences:
  description:
    - On a built node, what differs from the former manifest and is reported by no other module (C(profile),
      C(expect), C(offload_dir), C(gds)).
  returned: always
  type: list
  elements: dict
checks:
  description: Every configuration check with its status, expected and found.
  returned: when the manifest was written or kept
  type: list
  elements: dict
"""

import json  # noqa: E402  (Ansible wants the documentation first)
import os  # noqa: E402
from dataclasses import asdict  # noqa: E402
from typing import Any, Collection  # noqa: E402

from ..module_utils.array.drive_volumes import broken_text  # noqa: E402
from ..module_utils.audit.manifest_checks import BY_ID, LATER, WAITS, WARNS, run_checks  # noqa: E402
from ..module_utils.common.check_result import FAIL  # noqa: E402
from ..module_utils.common.drift import Difference, as_results, built_manifest, diff_entry, known_manifest  # noqa: E402
from ..module_utils.common.files import closed, content, open_directory, replace_file  # noqa: E402
from ..module_utils.common.manifest import MANIFEST_PATH, SCHEMA_NAME, SCHEMA_OF_SEVERAL, dump, each_volume, write  # noqa: E402
from ..module_utils.common.refusal import Refusal  # noqa: E402
from ..module_utils.machine.drives import read_drives  # noqa: E402
from ..module_utils.play.convergence import AnsibleModule, Words, change, in_one_line, line_of, look_at_earlier_manifest  # noqa: E402
from ..module_utils.tuning.deepspeed_aio import TUNED_PATH, VARIABLE, choose, render  # noqa: E402
from ..module_utils.units import UnitError, parse_bandwidth  # noqa: E402
from ..module_utils.volume.named_volume import describe_volume  # noqa: E402

SETTINGS: dict[str, Any] = {
    "profile": {"type": "str", "required": True},
    "volume": {"type": "str", "default": ""},
    "expect_read": {"type": "str", "default": ""},
    "expect_write": {"type": "str", "default": ""},
    "tuned": {"type": "dict", "default": {}},
}


def main() -> None:
    """Render, write, check."""
    module = AnsibleModule(
        argument_spec={
            "settings": {"type": "dict", "required": True, "options": SETTINGS},
            "array": {"type": "dict"},
            "members": {"type": "list", "elements": "dict"},
            "filesystem": {"type": "dict"},
            "volumes": {"type": "list", "elements": "dict", "default": []},
            "memory": {"type": "dict"},
            "gds": {"type": "dict"},
            "tuning": {"type": "dict", "default": {}},
            "offload_dir": {"type": "str", "default": ""},
            "offload": {"type": "dict", "default": {}},
            "reboot_reasons": {"type": "list", "elements": "str", "default": []},
            "keep_training": {"type": "bool", "default": False},
            "tool_version": {"type": "str", "required": True},
        },
        required_by={"array": ("members", "filesystem", "memory")},
        supports_check_mode=True,
    )
    words: Words = {UnitError: lambda error: "tunetool_expect: %s" % line_of(error)}
    # Before the lock: the owner's volume may hang, and with it whoever waits for this node.
    with in_one_line(module, words):
        storage = storage_of(module.params)
        # A look at one that is broken fails.
        tuned = _tuned(module, each_volume(_without(storage, broken_of(module)))[0][1]["filesystem"]["mount_point"])
    document, result = change(module, lambda: write_manifest(module, storage, tuned), words)
    if module.check_mode:
        module.exit_json(**result)
    judge(module, document, result)


def write_manifest(
    module: AnsibleModule, storage: dict[str, Any], tuned: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The document, which is on the disk now unless in check mode, and the module's result."""
    wanted = module.params
    directions = [name for name in ("read", "write") if wanted["expect_" + name]]
    document = {
        "schema": SCHEMA_OF_SEVERAL if "volumes" in storage else SCHEMA_NAME,
        "profile": wanted["profile"],
        **storage,
        "memory": wanted["memory"] or {"hugepages": [], "shm_bytes": None, "memlock": None},
        "gds": wanted["gds"] or {"mode": "off", "reasons": ["nothing was set up"]},
        **({"tuning": wanted["tuning"]} if wanted["tuning"] else {}),
        **({} if "volumes" in storage else {"offload_dir": wanted["offload_dir"] or None}),
        **({"offload": wanted["offload"]} if wanted["offload"] and _offloads(wanted, storage) else {}),
        "expect": {name: parse_bandwidth(wanted["expect_" + name]) for name in directions},
        "reboot_required": bool(wanted["reboot_reasons"]),
        "tool_version": wanted["tool_version"],
    }
    document.update({"aio": tuned} if tuned else {})
    block = render(tuned["block"]) if tuned else None
    training = (known_manifest() or {}).get("training") if wanted["keep_training"] else None
    document.update({"training": training} if training else {})
    look_at_earlier_manifest(module, "it is replaced")
    before, after = content(MANIFEST_PATH), dump(document)
    built = known_manifest() or document
    stale = content(TUNED_PATH) != (block or "")
    directory = os.path.dirname(MANIFEST_PATH)
    result: dict[str, Any] = {
        # An earlier version made the directory under root's umask.
        "changed": before != after or stale or bool(closed([directory])),
        "differences": as_results(
            [
                Difference("manifest." + key, json.dumps(document[key]), json.dumps(built[key]))
                for key in ("profile", "expect", "offload_dir", "gds")
                if key in document and key in built and document[key] != built[key]
            ]
        ),
        "diff": diff_entry(MANIFEST_PATH, before, after),
    }
    if result["changed"] and not module.check_mode:
        with in_one_line(module, **result):
            module.change_begins()
            _write_block(block, stale)
            if before != after:
                write(document)
            open_directory(directory)
    return document, result


def judge(module: AnsibleModule, document: dict[str, Any], result: dict[str, Any]) -> None:
    """Check the node against its manifest and end the module: with failure where something is not as asked."""
    left = broken_of(module)
    checks = run_checks(_without(document, left))
    nothing = (LATER, WAITS) if document["reboot_required"] else (LATER,)
    bad = [check for check in checks if check.status == FAIL and BY_ID[check.id].building not in nothing]
    failed = [check for check in bad if BY_ID[check.id].building != WARNS]
    result["checks"] = [asdict(check) for check in checks]
    if failed:
        lines = ["%s: expected %s, found %s. hint: %s" % (c.id, c.expected, c.found, c.remedy) for c in failed]
        module.fail_json(msg="built, but not as asked:\n" + "\n".join(lines), **result)
    for check in bad:
        module.warn("%s: found %s. hint: %s" % (check.id, check.found, check.remedy))
    present = {drive.serial for drive in read_drives()} if left else set()
    for name, serials in left.items():
        module.warn(broken_text(name, serials, present))
    for reason in module.params["reboot_reasons"]:
        module.warn("reboot required: %s" % reason)
    module.exit_json(**result)


def broken_of(module: AnsibleModule) -> dict[str, list[str]]:
    """Serials of the drives of each volume that is broken, and that was left alone, by its name."""
    volumes = module.params["volumes"]
    return {
        each["name"]: [member["serial"] for member in each["array"]["members"]] for each in volumes if each.get("left")
    }


def _without(document: dict[str, Any], left: Collection[str]) -> dict[str, Any]:
    """The manifest, or its parts, of a node that has only the other volumes."""
    if not left:
        return document
    return dict(document, volumes=[each for each in document["volumes"] if each["name"] not in left])


def storage_of(wanted: dict[str, Any]) -> dict[str, Any]:
    """The manifest's parts `array` and `filesystem`. Raises ``Refusal``."""
    if not wanted["volume"]:
        if wanted["volumes"]:
            # What is broken is said by the run, and found by each check.
            return {"volumes": [{key: each[key] for key in each if key != "left"} for each in wanted["volumes"]]}
        if wanted["array"] is None:
            raise Refusal("neither `array` nor `volume` is given. hint: the roles that build the volume come first")
        return {"array": dict(wanted["array"], members=wanted["members"]), "filesystem": wanted["filesystem"]}
    built = built_manifest()
    if built is not None:
        raise Refusal(
            "`tunetool_volume`: array `%s` was built on this node. hint: leave the variable out, or remove that volume "
            "first by `ansible-playbook tunetool.node.teardown`" % each_volume(built)[0][1]["array"]["name"]
        )
    return {"array": None, "filesystem": describe_volume(wanted["volume"])}


def _offloads(wanted: dict[str, Any], storage: dict[str, Any]) -> bool:
    return bool(wanted["offload_dir"] or any(volume["offload_dir"] for volume in storage.get("volumes", ())))


def _tuned(module: AnsibleModule, mount_point: str) -> dict[str, Any] | None:
    """This node's block as in the manifest; None without one."""
    wanted = module.params
    block = choose(wanted["tuned"], mount_point)
    if block is None and wanted["tuned"]:
        module.warn("%s has no result of hardware like this: run `tunetool tune --store-vars` on this node" % VARIABLE)
    return block


def _write_block(block: str | None, stale: bool) -> None:
    if stale and block is None:
        os.unlink(TUNED_PATH)
    elif stale and block is not None:
        replace_file(TUNED_PATH, block)


if __name__ == "__main__":
    main()
