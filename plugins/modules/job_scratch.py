#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: install or remove what gives each job a directory on the scratch volume."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: job_scratch
short_description: Give each job a directory of its own on the scratch volume
version_added: "0.1.0"
description:
  - Writes C(/etc/tunetool/job-scratch.json), a starter beside the program and C(tunetool-scratch.timer) with its
    service, and starts the timer. The starter without an argument is a program for Slurm's C(Prolog), C(Epilog) and
    C(TaskProlog).
  - Without C(enabled) removes all of it again. Directories of jobs stay.
options:
  settings:
    description:
      - The variables of the role P(tunetool.node.job_scratch#role) without its name; C(enabled) and C(directory) are
        required.
    type: dict
    required: true
  mount_point:
    description: Mount point of the volume.
    type: path
    required: true
  installed:
    description: Whether the program is on the node; it is needed.
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
- name: Give each job at most a quarter of the volume
  tunetool.node.job_scratch:
    mount_point: /mnt/nvme_raid0
    settings:
      enabled: true
      directory: /mnt/nvme_raid0/jobs
      limit: 25%
"""

RETURN = r"""
starter:
  description: Path of the program for Slurm.
  returned: success
  type: str
"""

from typing import Any  # noqa: E402  (Ansible wants the documentation first)

from ..module_utils.common.commands import CommandError  # noqa: E402
from ..module_utils.common.refusal import Refusal  # noqa: E402
from ..module_utils.job_scratch import scratch_units  # noqa: E402
from ..module_utils.job_scratch.settings import dump, problems_of  # noqa: E402
from ..module_utils.machine.mounts import plain_path  # noqa: E402
from ..module_utils.play.convergence import AnsibleModule, Words, change  # noqa: E402

SETTINGS: dict[str, Any] = {
    "enabled": {"type": "bool", "required": True},
    "directory": {"type": "path", "required": True},
    "limit": {"type": "str", "default": "25%"},
    "by_request": {"type": "bool", "default": False},
    "textfile_directory": {"type": "str", "default": ""},
}
ARGUMENTS: dict[str, Any] = {
    "installed": {"type": "bool", "default": True},
    "program": {"type": "path", "default": "/opt/tunetool/bin/tunetool"},
    "mount_point": {"type": "path", "required": True},
    "settings": {"type": "dict", "required": True, "options": SETTINGS},
}


def texts(wanted: dict[str, Any]) -> dict[str, str]:
    """The wanted files; empty if there must be none."""
    if not wanted["enabled"]:
        return {}
    if not wanted["installed"]:
        raise Refusal("`job_scratch_enabled` needs the program on the node. hint: set `tunetool_install: true`")
    problems = problems_of(wanted, wanted["mount_point"])
    if problems:
        raise Refusal(problems[0])
    settings = dump(wanted, wanted["mount_point"])
    places = (plain_path(wanted[name]) for name in ("mount_point", "directory"))
    return scratch_units.files(wanted["program"], settings, *places)


def main() -> None:
    """Install or remove it under the node's lock, and report."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    wanted = module.params
    words: Words = {CommandError: lambda error: "%s. hint: see `systemctl status %s`" % (error, scratch_units.TIMER)}
    diff = change(
        module,
        lambda: scratch_units.converge(
            wanted["program"], texts(wanted), wanted["textfile_directory"], not module.check_mode, module.change_begins
        ),
        words,
    )
    module.exit_json(changed=bool(diff), diff=diff, starter=scratch_units.starter_path(wanted["program"]))


if __name__ == "__main__":
    main()
