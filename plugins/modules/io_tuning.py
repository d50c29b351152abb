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
  scheduler:
    description: I/O scheduler of the member drives, as the kernel names it; empty leaves it alone.
    type: str
    default: ""
  nr_requests:
    description: Requests in the queue of a member drive. Without a scheduler, the drive's own tags are the limit.
    type: str
    default: ""
  nomerges:
    description: Merging of requests on the member drives, V(0) on, V(1) the simple ones only, V(2) off.
    type: str
    default: ""
  read_ahead:
    description: Read-ahead of the array, such as V(4MiB). Only buffered reads use it.
    type: str
    default: ""
  transparent_hugepages:
    description: Transparent huge pages, V(always), V(madvise) or V(never).
    type: str
    default: ""
  cpu_governor:
    description: Frequency governor of the CPUs. Skipped with a warning where there is no cpufreq.
    type: str
    default: ""
  cpu_latency_us:
    description: Longest wake-up from an idle state, in microseconds. Skipped with a warning without cpuidle.
    type: str
    default: ""
  dirty_background:
    description: Amount of dirty pages at which the kernel starts to write back, as a size or a share of the memory.
    type: str
    default: ""
  dirty:
    description: Amount of dirty pages at which a writing program must wait, as a size or a share of the memory.
    type: str
    default: ""
  fstrim_timer:
    description: Weekly discard of unused blocks, V(enabled) or V(disabled).
    type: str
    default: ""
extends_documentation_fragment: [tunetool.node.changes]
author:
  - The tunetool authors (@tunetool)
"""

EXAMPLES = r"""
- name: Keep the drives' requests unsorted, and read far ahead
  tunetool.node.io_tuning:
    serials: "{{ nvme_drives_result.selected | map(attribute='serial') }}"
    array_uuid: "{{ raid_array_result.array.uuid }}"
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
from ..module_utils.play.ansible_module import AnsibleModule  # noqa: E402
from ..module_utils.play.convergence import converge  # noqa: E402
from ..module_utils.tuning.apply import TuningJob  # noqa: E402


def main() -> None:
    """Compare every setting, then set what differs."""
    module = AnsibleModule(
        argument_spec={
            "serials": {"type": "list", "elements": "str", "default": []},
            "array_uuid": {"type": "str", "default": ""},
            **ARGUMENTS,
        },
        supports_check_mode=True,
    )
    tuning, answer = converge(module, lambda ledger: TuningJob(module.params, ledger).all())
    module.exit_json(tuning=tuning, **answer)


if __name__ == "__main__":
    main()
