#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: run one of ``tunetool bench``'s benchmarks and bring its record back."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: bench_node
short_description: Run a benchmark of tunetool on the node
version_added: "0.1.0"
description:
  - Runs C(tunetool), which the role P(tunetool.node.tunetool#role) installs, and returns the record that it makes.
  - A benchmark that could not judge, or whose result falls short, is no failure of this module. RV(rc) and RV(record)
    say it, and the caller decides.
options:
  executable:
    description: The program. Where it does not exist, C(tunetool) is looked up on the PATH.
    type: path
    default: /opt/tunetool/bin/tunetool
  arguments:
    description: Its command line without C(--json), such as V(bench), V(checkpoint), V(--target), V(/mnt/nvme_raid0).
    type: list
    elements: str
    required: true
author:
  - The tunetool authors (@tunetool)
attributes:
  check_mode:
    description: The module is skipped.
    support: none
  diff_mode:
    description: There is no difference to show.
    support: none
"""

EXAMPLES = r"""
- name: Checkpoints of a small state on the scratch volume
  tunetool.node.bench_node:
    arguments: [bench, checkpoint, --target, /mnt/nvme_raid0, --model, phi3-mini, --state-bytes, 8GB]
"""

RETURN = r"""
record:
  description: The record as C(--json -) prints it.
  returned: when there is one
  type: dict
rc:
  description: Exit status of the program. 0 it holds, 1 it falls short, 2 the call was wrong, 3 it could not be judged.
  returned: always
  type: int
stderr_tail:
  description: The last lines of what it said meanwhile.
  returned: always
  type: list
  elements: str
"""

from ..module_utils.play.ansible_module import AnsibleModule  # noqa: E402
from ..module_utils.play.tunetool_command import ask  # noqa: E402


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "executable": {"type": "path", "default": "/opt/tunetool/bin/tunetool"},
            "arguments": {"type": "list", "elements": "str", "required": True},
        },
        supports_check_mode=False,
    )
    module.exit_json(changed=False, **ask(module, list(module.params["arguments"]) + ["--json", "-"]))


if __name__ == "__main__":
    main()
