#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: huge pages, /dev/shm and locked memory, now and after every boot."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host_memory
short_description: Huge pages, /dev/shm and the limit on locked memory
version_added: "0.1.0"
description:
  - Sets each of them now and makes it last. Leaves alone what was never asked for, and frees a pool of huge
    pages that is no longer asked for.
options:
  settings:
    description:
      - The variables of the role P(tunetool.node.host_memory#role) without its name, such as C(shm_size). One that is
        left out is left alone.
      - 1 GiB pages go onto the kernel's command line, where the boot loader is GRUB as Debian and Ubuntu have it, or
        one that grubby knows. What the running kernel does not find at once waits for a reboot, RV(reboot_reasons).
      - A kernel that does not offer the value of C(shm_huge) keeps V(never), with a warning.
    type: dict
    default: {}
extends_documentation_fragment: [tunetool.node.changes]
author:
  - The tunetool authors (@tunetool)
"""

EXAMPLES = r"""
- name: Give jobs their memory
  tunetool.node.host_memory:
    settings:
      hugepages:
        - {size: 2MiB, count: 4096}
      shm_size: 50%
      shm_huge: within_size
      memlock: unlimited
"""

RETURN = r"""
memory:
  description: What was asked for, as the manifest holds it.
  returned: success
  type: dict
differences:
  description:
    - On a built node, what is not as asked. C(mended) is false for what was left, with a C(hint).
  returned: always
  type: list
  elements: dict
hugepages_bytes:
  description: RAM that the pools take.
  returned: success
  type: int
ram_bytes:
  description: RAM that the node has.
  returned: success
  type: int
reboot_reasons:
  description: Settings that take effect only after a reboot; empty if there are none.
  returned: success
  type: list
  elements: str
"""

from typing import Any  # noqa: E402  (Ansible wants the documentation first)

from ..module_utils.common.drift import Ledger  # noqa: E402
from ..module_utils.machine.memory import memory_total  # noqa: E402
from ..module_utils.memory.apply import ARGUMENTS, MemoryJob  # noqa: E402
from ..module_utils.play.convergence import AnsibleModule, converge  # noqa: E402


def main() -> None:
    """Compare the three settings, then set what differs."""
    module = AnsibleModule(
        argument_spec={"settings": {"type": "dict", "default": {}, "options": ARGUMENTS}}, supports_check_mode=True
    )

    def work(ledger: Ledger) -> tuple[dict[str, Any], list[str]]:
        job = MemoryJob(module.params, ledger)
        return job.all(), job.reboot_reasons

    (memory, reasons), answer = converge(module, work)
    module.exit_json(
        hugepages_bytes=sum(pool["size_kib"] * 1024 * pool["count"] for pool in memory["hugepages"]),
        memory=memory,
        ram_bytes=memory_total(),
        reboot_reasons=reasons,
        **answer,
    )


if __name__ == "__main__":
    main()
