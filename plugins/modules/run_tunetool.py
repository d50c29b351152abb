#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: run a ``tunetool`` command on the node and bring its record back."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: run_tunetool
short_description: Run a tunetool command on the node and return its record or inspection
version_added: "0.1.0"
description:
  - Runs C(tunetool), which the role P(tunetool.node.tunetool#role) installs, and returns the record that it makes.
  - Runs only commands that make a record, C(verify), C(accept), C(stage), C(bench) and C(tune), and C(inspect). No
    shell reads the arguments.
  - What needs torch or DeepSpeed uses the Python that the node's own manifest names for training.
  - The command ends, and removes its files, when the connection to this module is lost or the module is killed.
options:
  executable:
    description: Path of the program. Where it does not exist, C(tunetool) is looked up on the PATH.
    type: path
    default: /opt/tunetool/bin/tunetool
  command:
    description: The words of the command, such as V(verify), or V(bench) and V(checkpoint).
    type: list
    elements: str
    required: true
  options:
    description:
      - Options of the command by name, such as C(target=/mnt/nvme_raid0). A list gives the option once for each of its
        elements, V(true) gives a flag. What is empty or V(false) is left out.
      - They are meant for values from an inventory. An option in O(arguments) wins over one from here.
    type: dict
    default: {}
  arguments:
    description: The rest of the command line without C(--json), such as V(--level), V(full).
    type: list
    elements: str
    default: []
  judge:
    description: Fail if the node falls short or could not be judged. Otherwise only RV(rc) and RV(record) report that.
    type: bool
    default: false
author:
  - The tunetool authors (@tunetool)
attributes:
  check_mode:
    description: Runs the checks of C(verify) without a measurement, and C(inspect). Skips other commands.
    support: partial
    details: A copy or a benchmark cannot be predicted.
  diff_mode:
    description: There is no difference to show.
    support: none
"""

EXAMPLES = r"""
- name: Measure the node's storage and judge it
  tunetool.node.run_tunetool:
    command: [verify]
    options:
      expect: [read=50GBps, write=25GBps]
      duration: 30s
    judge: true

- name: Copy the model to memory before the job
  tunetool.node.run_tunetool:
    command: [stage, copy]
    arguments: [/nfs/models/qwen2.5-vl-7b, /dev/shm/qwen2.5-vl-7b]

- name: Checkpoints of a small state on the scratch volume
  tunetool.node.run_tunetool:
    command: [bench, checkpoint]
    options: {target: /mnt/nvme_raid0, model: phi3-mini, state_bytes: 8GB}
"""

RETURN = r"""
record:
  description: The record as C(--json -) prints it.
  returned: when there is one
  type: dict
inspection:
  description: What C(inspect --json -) prints.
  returned: when the command is C(inspect)
  type: dict
rc:
  description: Exit status. 0 it holds or is done, 1 it falls short, 2 the call was wrong, 3 it could not be judged.
  returned: when the command ran
  type: int
stderr_tail:
  description: The last lines of standard error.
  returned: when the command ran
  type: list
  elements: str
"""

from ..module_utils.play.convergence import AnsibleModule, in_one_line  # noqa: E402  (Ansible wants the documentation first)
from ..module_utils.play.tunetool_command import HAVE_CHECK_MODE, command_line, run  # noqa: E402


def main() -> None:
    """Run the command and report."""
    module = AnsibleModule(
        argument_spec={
            "executable": {"type": "path", "default": "/opt/tunetool/bin/tunetool"},
            "command": {"type": "list", "elements": "str", "required": True},
            "options": {"type": "dict", "default": {}},
            "arguments": {"type": "list", "elements": "str", "default": []},
            "judge": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
        keep_umask=True,
    )
    command = module.params["command"]
    with in_one_line(module):
        argv = command_line(command, module.params["options"], module.params["arguments"], module.check_mode)
    if module.check_mode and command not in HAVE_CHECK_MODE:
        module.exit_json(changed=False, skipped=True, msg="`tunetool %s` has no check mode" % " ".join(command))
    result = run(module, argv)
    if module.params["judge"] and result["rc"] != 0:
        module.fail_json(**result)
    # Without `failed`, Ansible takes any `rc` but 0 for a failure.
    module.exit_json(failed=False, **result)


if __name__ == "__main__":
    main()
