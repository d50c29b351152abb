#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: install or remove the node's health check."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: node_health
short_description: Check the node against its manifest by a timer
version_added: "0.1.0"
description:
  - Writes C(/etc/tunetool/health.json), a starter beside the program and C(tunetool-health.timer) with its service, and
    starts the timer. The starter without an argument is a program for Slurm's C(HealthCheckProgram), which drains a
    sick node and takes back only its own drain.
  - With C(socket), a unit that answers the launcher of nvidia-resiliency-ext there.
  - Without C(enabled) removes all of it again.
options:
  settings:
    description:
      - The variables of the role P(tunetool.node.node_health#role) without its name; C(enabled) is required.
    type: dict
    required: true
  installed:
    description: Whether the program is on the node; the health check needs it.
    type: bool
    default: true
  program:
    description: Path of the program.
    type: path
    default: /opt/tunetool/bin/tunetool
extends_documentation_fragment: [tunetool.node.changes]
author:
  - The tunetool authors (@tunetool)
"""

EXAMPLES = r"""
- name: Check the node every half hour
  tunetool.node.node_health:
    settings:
      enabled: true
      period: 1800
      textfile_directory: /var/lib/prometheus/node-exporter
"""

RETURN = r"""
starter:
  description: Path of the program for Slurm's C(HealthCheckProgram).
  returned: success
  type: str
"""

from typing import Any  # noqa: E402  (Ansible wants the documentation first)

from ..module_utils.common.commands import CommandError  # noqa: E402
from ..module_utils.common.refusal import Refusal  # noqa: E402
from ..module_utils.health import health_units  # noqa: E402
from ..module_utils.health.settings import dump, problems_of  # noqa: E402
from ..module_utils.play.convergence import AnsibleModule, Words, change, in_one_line  # noqa: E402

SETTINGS: dict[str, Any] = {
    "enabled": {"type": "bool", "required": True},
    "period": {"type": "int", "default": 900},
    "measure_every": {"type": "int", "default": 0},
    "textfile_directory": {"type": "str", "default": ""},
    "socket": {"type": "str", "default": ""},
    "ignored_checks": {"type": "list", "elements": "str", "default": []},
    "kernel_log": {"type": "bool", "default": True},
    "write": {"type": "bool", "default": True},
}
ARGUMENTS: dict[str, Any] = {
    "installed": {"type": "bool", "default": True},
    "program": {"type": "path", "default": "/opt/tunetool/bin/tunetool"},
    "settings": {"type": "dict", "required": True, "options": SETTINGS},
}


def texts(wanted: dict[str, Any]) -> dict[str, str]:
    """The wanted files; empty if there must be none."""
    if not wanted["enabled"]:
        return {}
    if not wanted["installed"]:
        raise Refusal("`node_health_enabled` needs the program on the node. hint: set `tunetool_install: true`")
    problems = problems_of(wanted)
    if problems:
        raise Refusal(problems[0])
    settings = dump(
        wanted["period"],
        wanted["measure_every"] * 3600,
        wanted["textfile_directory"],
        wanted["ignored_checks"],
        wanted["kernel_log"],
        wanted["write"],
    )
    return health_units.files(wanted["program"], settings, wanted["period"], wanted["socket"])


def converge(module: AnsibleModule) -> list[dict[str, str]]:
    """Compare, then write or remove. Returns the diff."""
    wanted = module.params
    files = texts(wanted)
    return health_units.converge(
        wanted["program"],
        files,
        wanted["textfile_directory"] if files else "",
        socket=bool(wanted["socket"]),
        measures=wanted["measure_every"] > 0,
        acting=not module.check_mode,
        begins=module.change_begins,
    )


def main() -> None:
    """Install or remove the health check under the node's lock, and report."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    wanted = module.params
    words: Words = {CommandError: lambda error: "%s. hint: see `systemctl status %s`" % (error, health_units.TIMER)}
    diff = change(module, lambda: converge(module), words)
    if diff and not module.check_mode:
        module.change_begins()
        with in_one_line(module, words):
            health_units.take_effect(wanted["enabled"], bool(wanted["socket"]))
    module.exit_json(changed=bool(diff), diff=diff, starter=health_units.starter_path(wanted["program"]))


if __name__ == "__main__":
    main()
