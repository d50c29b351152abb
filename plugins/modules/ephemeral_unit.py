#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: install or remove the unit that rebuilds the scratch volume on drives that came back blank."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: ephemeral_unit
short_description: A boot-time unit that rebuilds the scratch volume when every local drive came back blank
version_added: "0.1.0"
description:
  - Writes C(/etc/tunetool/ephemeral.json) and C(tunetool-ephemeral.service), and enables it. Started now, it finds the
    volume and does nothing; a node on which it cannot run fails here and not at the next boot.
  - What was built is read from the manifest, so M(tunetool.node.node_manifest) must have run.
  - Without C(enabled) removes both again.
options:
  settings:
    description:
      - The variables of the role P(tunetool.node.ephemeral#role) without its name; C(enabled) is required.
    type: dict
    required: true
  drives:
    description:
      - The variables of the role P(tunetool.node.nvme_drives#role) without its name; C(count) is required.
    type: dict
    required: true
  filesystem:
    description:
      - The variables of the role P(tunetool.node.scratch_filesystem#role) without its name; C(mount_point) is required.
    type: dict
    required: true
  installed:
    description: Whether the program is on the node; the unit needs it.
    type: bool
    default: true
  program:
    description: Path of the program.
    type: path
    default: /opt/tunetool/bin/tunetool
author:
  - The tunetool authors (@tunetool)
attributes:
  check_mode:
    description: Says what would be written or removed.
    support: full
  diff_mode:
    description: Shows every file before and after.
    support: full
"""

EXAMPLES = r"""
- name: Rebuild the scratch volume after a stop and start
  tunetool.node.ephemeral_unit:
    settings:
      enabled: true
    drives:
      count: 8
      size: 3.5TiB
      transport: pcie
    filesystem:
      mount_point: /mnt/nvme_raid0
"""

RETURN = r"""
unit:
  description: Name of the unit.
  returned: success
  type: str
"""

from typing import Any  # noqa: E402  (Ansible wants the documentation first)

from ..module_utils.array.drive_decisions import DRIVES, criteria_of  # noqa: E402
from ..module_utils.common import manifest as manifests  # noqa: E402
from ..module_utils.common.commands import CommandError  # noqa: E402
from ..module_utils.common.drift import Ledger  # noqa: E402
from ..module_utils.common.refusal import Refusal  # noqa: E402
from ..module_utils.ephemeral.boot_decision import SCHEMA_NAME, dump  # noqa: E402
from ..module_utils.ephemeral.boot_unit import UNIT, changes, files, has_run, take_effect  # noqa: E402
from ..module_utils.play.convergence import AnsibleModule, Words, converge, in_one_line  # noqa: E402
from ..module_utils.volume.offload_access import asked  # noqa: E402
from ..module_utils.volume.unit_dropins import apply, units_problem  # noqa: E402
from ..module_utils.volume.volume_values import SETTINGS as FILESYSTEM  # noqa: E402
from ..module_utils.volume.volume_values import mode_problem  # noqa: E402

SETTINGS: dict[str, Any] = {
    "enabled": {"type": "bool", "required": True},
    "wait_seconds": {"type": "int", "default": 30},
}


def configuration(wanted: dict[str, Any], offload: bool) -> dict[str, Any]:
    """The settings that the manifest lacks. Raises ``UnitError``, or ``KeyError`` for an unknown owner."""
    drives = criteria_of(wanted["drives"])
    return {
        "schema": SCHEMA_NAME,
        "drives": {
            "model": drives.model,
            "size_bytes": drives.size_bytes or None,
            "transport": drives.transport,
            "serials": list(drives.serials),
        },
        "label": wanted["filesystem"]["label"],
        "offload": asked(wanted["filesystem"]) if offload else None,
        "wait_seconds": wanted["wait_seconds"],
    }


def texts(wanted: dict[str, Any], check_mode: bool) -> dict[str, str]:
    """The wanted files; empty if there must be none."""
    if not wanted["enabled"]:
        return {}
    if not wanted["installed"]:
        raise Refusal("`ephemeral_enabled` needs the program on the node. hint: set `tunetool_install: true`")
    if wanted["wait_seconds"] < 0:
        raise Refusal("`ephemeral_wait_seconds` is below zero. hint: 30 is enough for local drives")
    services = wanted["filesystem"]["services"]
    problem = units_problem(services) or mode_problem(wanted["filesystem"]["offload_mode"])
    if problem:
        raise Refusal(problem)
    manifest: dict[str, Any]
    try:
        manifest = manifests.load()
    except FileNotFoundError:
        if not check_mode:
            raise Refusal("`%s` is not there. hint: run role tunetool first" % manifests.MANIFEST_PATH) from None
        # A blank node: the names are known only after the build.
        manifest = {"filesystem": {"uuid": "(new)", "mount_point": "/(new)"}, "offload_dir": "(new)"}
    if manifest.get("array", {}) is None:
        raise Refusal(
            "`ephemeral_enabled` is for an array that was built here, and this node's volume is its owner's. hint: "
            "leave out `ephemeral_enabled` or `tunetool_volume`"
        )
    config = dump(configuration(wanted, manifest["offload_dir"] is not None))
    return files(manifest, wanted["program"], services, config)


def work(module: AnsibleModule, ledger: Ledger) -> None:
    """Compare, then write or remove."""
    wanted = texts(module.params, module.check_mode)
    for each in changes(wanted):
        if ledger.note(each.path, each.before, each.after):
            apply(each)
    if wanted and not has_run():
        # It is new, or it failed at boot and the volume was repaired since.
        ledger.note(UNIT, "", "active\n")


def main() -> None:
    """Install or remove the unit under the node's lock, and report."""
    module = AnsibleModule(
        argument_spec={
            "settings": {"type": "dict", "required": True, "options": SETTINGS},
            "drives": {"type": "dict", "required": True, "options": DRIVES},
            "filesystem": {"type": "dict", "required": True, "options": FILESYSTEM},
            "installed": {"type": "bool", "default": True},
            "program": {"type": "path", "default": "/opt/tunetool/bin/tunetool"},
        },
        supports_check_mode=True,
    )
    words: Words = {
        CommandError: lambda error: "%s. hint: see `systemctl status %s`" % (error, UNIT),
        KeyError: lambda error: "offload directory: %s. hint: make the user or group first" % error.args[0],
    }
    _, answer = converge(module, lambda ledger: work(module, ledger), lambda: None, words)
    # Outside of the lock, which the unit's program takes itself.
    if answer["changed"] and not module.check_mode:
        module.change_begins()
        with in_one_line(module, words):
            take_effect(module.params["enabled"])
    module.exit_json(changed=answer["changed"], diff=answer["diff"], unit=UNIT)


if __name__ == "__main__":
    main()
