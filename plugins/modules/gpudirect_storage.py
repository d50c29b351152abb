#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: decide the path of GPUDirect Storage on this node and set it up."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpudirect_storage
short_description: Decide which path GPUDirect Storage takes on this node, and set it up
version_added: "0.1.0"
description:
  - Reads the facts (GPUs, driver, nvidia-fs, NVMe driver, kernel, volume, IOMMU, udev), chooses V(nvidia-fs),
    V(p2pdma), V(compat) or V(off), and says why and what blocks the better ones.
  - Writes C(/etc/cufile.json), the override of the udev rule for md arrays and the files that load nvidia-fs, builds
    nvidia-fs again where it was built for another driver, and loads it. Removes what it wrote earlier and what is no
    longer wanted; puts back the file that was at C(/etc/cufile.json) before.
  - Installs no package and never reboots. Where RV(packages) is not empty, only O(repository_files) were written;
    install them and call the module again.
options:
  mode:
    description: V(auto) for the best path that the node supports, or one path that is required.
    type: str
    choices: [auto, nvidia-fs, p2pdma, compat, "off"]
    default: auto
  mount_point:
    description: Mount point of the volume.
    type: path
  packages:
    description: Packages with nvidia-fs and libcufile; used only where these are missing, or O(versions) is given.
    type: list
    elements: str
    default: []
  versions:
    description: Pinned version by package.
    type: dict
    default: {}
  repository_files:
    description: Text by path of the files that give the package manager the repository and its key.
    type: dict
    default: {}
  pins:
    description: Text by path of the files that pin versions for the package manager.
    type: dict
    default: {}
  configs:
    description: Text of C(/etc/cufile.json) by path.
    type: dict
    default: {}
  keep_config:
    description: For V(compat), leave an existing C(/etc/cufile.json) alone if it allows that path.
    type: bool
    default: true
extends_documentation_fragment: [tunetool.node.changes]
author:
  - The tunetool authors (@tunetool)
attributes:
  diff_mode:
    description: Shows files, and what would be built and loaded, before and after.
    support: full
"""

EXAMPLES = r"""
- name: Set up the best path
  tunetool.node.gpudirect_storage:
    mount_point: /mnt/nvme_raid0
    configs:
      nvidia-fs: |
        // Written by tunetool (role gpudirect_storage)
        {"properties": {"allow_compat_mode": true}}
"""

RETURN = r"""
gds:
  description: C(mode) and C(reasons), as the manifest holds them.
  returned: success
  type: dict
paths:
  description: Every path, best first, with C(blockers) (C(id), C(found), C(remedy), C(curable)) and C(notes).
  returned: success
  type: list
  elements: dict
packages:
  description: What must be installed first, for apt or dnf, each with its pinned version if it has one.
  returned: success
  type: list
  elements: str
acting:
  description: False in check mode, where the repository that O(repository_files) names is not known to the node yet.
  returned: success
  type: bool
reboot_reasons:
  description: Why a reboot is needed; empty when none is.
  returned: success
  type: list
  elements: str
differences:
  description: On a built node, what was not as asked.
  returned: success
  type: list
  elements: dict
"""

from dataclasses import asdict  # noqa: E402  (Ansible wants the documentation first)

from ..module_utils.common.commands import CommandError  # noqa: E402
from ..module_utils.common.drift import Ledger, built_manifest  # noqa: E402
from ..module_utils.gds.apply import GdsJob  # noqa: E402
from ..module_utils.gds.path_choice import AUTO, MODES, Decision  # noqa: E402
from ..module_utils.play.convergence import AnsibleModule, Words, change, outcome  # noqa: E402


def main() -> None:
    """Decide and act under the node's lock, and report."""
    module = AnsibleModule(
        argument_spec={
            "mode": {"type": "str", "choices": [AUTO, *MODES], "default": AUTO},
            "mount_point": {"type": "path"},
            "packages": {"type": "list", "elements": "str", "default": []},
            "versions": {"type": "dict", "default": {}},
            "repository_files": {"type": "dict", "default": {}},
            "pins": {"type": "dict", "default": {}},
            "configs": {"type": "dict", "default": {}},
            "keep_config": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )

    def work() -> tuple[GdsJob, Decision]:
        job = GdsJob(module.params, Ledger(built_manifest(), not module.check_mode, module.change_begins))
        return job, job.all()

    words: Words = {CommandError: lambda error: "%s. hint: see `dmesg` and /var/lib/dkms/nvidia-fs" % error}
    job, decision = change(module, work, words)
    module.exit_json(
        **outcome(job.ledger),
        gds={"mode": decision.mode, "reasons": list(decision.reasons)},
        paths=[asdict(path) for path in decision.paths],
        packages=job.packages,
        acting=job.ledger.acting,
        reboot_reasons=job.reboot_reasons,
    )


if __name__ == "__main__":
    main()
