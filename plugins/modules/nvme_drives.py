#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: choose the NVMe drives that become members, and say why for every drive."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: nvme_drives
short_description: Choose NVMe drives by model, size, transport and count, refusing all that are in use
version_added: "0.1.0"
description:
  - Reads every NVMe namespace of the node and decides for each whether it becomes a member of the scratch array.
  - A drive is refused when it is mounted, is swap, has partitions or holders, or carries any signature that
    libblkid knows (file system, partition table, RAID, LVM, ZFS, LUKS). Members of the array O(array_name) are kept.
  - Fails with a table of all drives unless exactly O(count) alike drives are usable. Changes nothing, ever.
options:
  count:
    description: How many drives the array has.
    type: int
    required: true
  array_name:
    description: Name of the array whose members count as ours.
    type: str
    required: true
  model:
    description: Glob that the model string must match, case-sensitive.
    type: str
  size:
    description: Nominal size, such as V(3.84TB); drives within 1 % of it match.
    type: str
  transport:
    description: Transport as sysfs names it.
    type: str
  serials:
    description: Exact serial numbers; others are ignored.
    type: list
    elements: str
    default: []
author:
  - The tunetool authors (@tunetool)
attributes:
  check_mode:
    description: Changes nothing in either mode.
    support: full
  diff_mode:
    description: Changes nothing, so there is no difference to show.
    support: none
"""

EXAMPLES = r"""
- name: Choose eight 3.84 TB drives
  tunetool.node.nvme_drives:
    count: 8
    size: 3.84TB
    transport: pcie
    array_name: nvme_raid0
  register: nvme_drives_result
"""

RETURN = r"""
selected:
  description: The members, by PCI address.
  returned: success
  type: list
  elements: dict
decisions:
  description: Every NVMe drive with its verdict (take, keep, refuse, ignore) and the reason.
  returned: always
  type: list
  elements: dict
table:
  description: The same as text.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402  (Ansible wants the documentation first)

from ..module_utils.contents import Signature, UnreadableDevice, claim_problem, read_signatures  # noqa: E402
from ..module_utils.drives import Drive, read_drives  # noqa: E402
from ..module_utils.selection import Criteria, select, table  # noqa: E402
from ..module_utils.units import UnitError, parse_size  # noqa: E402


def read_contents(drives: list[Drive]) -> tuple[dict[str, list[Signature]], dict[str, str]]:
    """Signatures by drive (its partitions' included), and the drives that could not be read."""
    found: dict[str, list[Signature]] = {}
    unreadable: dict[str, str] = {}
    owner = {name: drive.name for drive in drives for name in (drive.name, *drive.partitions)}
    try:
        everything = read_signatures(list(owner))
    except UnreadableDevice:
        # One bad drive must not hide the others: ask again, one by one, to find it.
        everything = []
        for drive in drives:
            try:
                everything += read_signatures([drive.name, *drive.partitions])
            except UnreadableDevice as error:
                unreadable[drive.name] = "cannot be read: %s" % error
    for signature in everything:
        found.setdefault(owner[signature.device], []).append(signature)
    for drive in drives:
        problem = None if drive.uses or drive.name in unreadable else claim_problem(drive.path)
        if problem:
            unreadable[drive.name] = problem
    return found, unreadable


def main() -> None:
    """Read, decide, report."""
    module = AnsibleModule(
        argument_spec={
            "count": {"type": "int", "required": True},
            "array_name": {"type": "str", "required": True},
            "model": {"type": "str"},
            "size": {"type": "str"},
            "transport": {"type": "str"},
            "serials": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    wanted = module.params
    if wanted["count"] < 1:
        module.fail_json(msg="`nvme_drives_count` is %d. hint: an array needs at least one drive" % wanted["count"])
    try:
        size = parse_size(wanted["size"]) if wanted["size"] else None
    except UnitError as error:
        module.fail_json(msg="nvme_drives_size: %s. hint: %s" % (error.message, error.hint))
    drives = read_drives()
    contents, unreadable = read_contents(drives)
    selection = select(
        drives,
        contents,
        Criteria(
            count=wanted["count"],
            model=wanted["model"],
            size_bytes=size,
            transport=wanted["transport"],
            serials=tuple(wanted["serials"]),
        ),
        wanted["array_name"],
        unreadable,
    )
    report = {
        "table": table(selection.decisions),
        "decisions": [
            {
                "name": row.drive.name,
                "serial": row.drive.serial,
                "model": row.drive.model,
                "size_bytes": row.drive.size_bytes,
                "verdict": row.verdict,
                "reason": row.reason,
            }
            for row in selection.decisions
        ],
    }
    if selection.problem:
        module.fail_json(
            msg="%s. hint: %s\n%s" % (selection.problem, selection.hint, report["table"]), changed=False, **report
        )
    module.exit_json(
        changed=False,
        selected=[
            {
                "serial": drive.serial,
                "model": drive.model,
                "by_id": drive.by_id,
                "size_bytes": drive.size_bytes,
                "pci_address": drive.pci_address,
                "numa_node": drive.numa_node,
            }
            for drive in selection.selected
        ],
        **report,
    )


if __name__ == "__main__":
    main()
