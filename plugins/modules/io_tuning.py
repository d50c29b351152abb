#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: settings of the I/O path, now and after every boot; reset when no longer asked for."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: io_tuning
short_description: Settings of drives, array, memory and CPUs that I/O depends on
version_added: "0.1.0"
description:
  - Sets what is asked for through C(/sys) and C(/proc), and makes it last by udev rules (drives by serial, the array by
    its UUID), tmpfiles.d, sysctl.d and, where tuned runs, a profile on top of the active one.
  - Leaves settings alone that were never asked for. Resets a setting that is no longer asked for to its value before
    the earlier run, unless something else has changed it since.
  - Names other files that set the same in a warning, with whether they win at the next boot.
options:
  serials:
    description: Serial numbers of the array's members.
    type: list
    elements: str
    default: []
  array_uuid:
    description: UUID of the array; empty where it is not made yet.
    type: str
    default: ""
  volumes:
    description:
      - Where there are several, RV(volumes) as tunetool.node.raid_array returned it, in place of O(array_uuid). What is
        set of the array is set of the array of each. Where they have none, it is set of each drive.
    type: list
    elements: dict
    default: []
  settings:
    description:
      - The variables of the role P(tunetool.node.io_tuning#role) without its name, such as C(read_ahead). One that is
        empty or left out is left alone.
    type: dict
    default: {}
extends_documentation_fragment: [tunetool.node.changes]
author:
  - The tunetool authors (@tunetool)
"""

EXAMPLES = r"""
- name: Keep the drives' requests unsorted, and read far ahead
  tunetool.node.io_tuning:
    serials: "{{ nvme_drives_result.selected | map(attribute='serial') }}"
    array_uuid: "{{ raid_array_result.array.uuid }}"
    settings:
      scheduler: none
      read_ahead: 4MiB
      fstrim_timer: enabled
"""

RETURN = r"""
tuning:
  description: What was asked for and exists here, as the manifest holds it.
  returned: success
  type: dict
differences:
  description:
    - On a built node, what is not as asked. C(mended) is false for what was left, with a C(hint).
  returned: always
  type: list
  elements: dict
"""

from ..module_utils.common.io_settings import ARGUMENTS  # noqa: E402  (Ansible wants the documentation first)
from ..module_utils.play.convergence import AnsibleModule, converge  # noqa: E402
from ..module_utils.tuning.apply import TuningJob  # noqa: E402


def main() -> None:
    """Compare every setting, then set what differs."""
    module = AnsibleModule(
        argument_spec={
            "serials": {"type": "list", "elements": "str", "default": []},
            "array_uuid": {"type": "str", "default": ""},
            "volumes": {"type": "list", "elements": "dict", "default": []},
            "settings": {"type": "dict", "default": {}, "options": ARGUMENTS},
        },
        supports_check_mode=True,
    )
    tuning, answer = converge(module, lambda ledger: TuningJob(module.params, ledger).all())
    module.exit_json(tuning=tuning, **answer)


if __name__ == "__main__":
    main()
