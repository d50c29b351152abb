#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: whose work a reboot would end."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: node_busy
short_description: Refuse while a reboot would end somebody's work
version_added: "0.1.0"
description:
  - Looks for Slurm jobs, for programs that have a GPU open, and for processes, mounts, loop devices and swap on the
    scratch volume. Changes nothing.
options:
  mount_point:
    description: Mount point of the scratch volume; empty for none.
    type: str
    default: ""
  allow:
    description: Report what it finds, and do not fail.
    type: bool
    default: false
extends_documentation_fragment: [tunetool.node.read_only]
author:
  - The tunetool authors (@tunetool)
"""

EXAMPLES = r"""
- name: Refuse to end somebody's job
  tunetool.node.node_busy:
    mount_point: /mnt/nvme_raid0
"""

RETURN = r"""
found:
  description: One line for each thing that a reboot would end.
  returned: always
  type: list
  elements: str
"""

import os  # noqa: E402  (Ansible wants the documentation first)

from ..module_utils.machine.busy import killed_by_a_reboot  # noqa: E402
from ..module_utils.play.convergence import READING, AnsibleModule, in_one_line  # noqa: E402


def main() -> None:
    """Find the work, and refuse."""
    module = AnsibleModule(
        argument_spec={
            "mount_point": {"type": "str", "default": ""},
            "allow": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    with in_one_line(module, READING):
        work = killed_by_a_reboot(module.params["mount_point"], os.environ)
    if work and not module.params["allow"]:
        more = " and %d more" % (len(work) - 1) if len(work) > 1 else ""
        module.fail_json(
            msg="busy: a reboot would end somebody's work: %s%s. hint: run this again when it is done; "
            "`node_reboot_even_if_busy: true` ends it" % (work[0], more),
            found=work,
            changed=False,
        )
    module.exit_json(changed=False, found=work)


if __name__ == "__main__":
    main()
