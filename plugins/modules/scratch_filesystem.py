#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: XFS aligned to its array, mounted by UUID, with the directory that jobs write to."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: scratch_filesystem
short_description: XFS aligned to an md array, mounted by UUID, with a directory for offloading
version_added: "0.1.0"
description:
  - Makes XFS on an array that holds nothing, with the stripe geometry given explicitly and read back. An array that was
    not made by M(tunetool.node.raid_array) is read for data that no label names, and gets none with O(adopt).
  - Keeps an XFS whose geometry is as asked. Refuses anything else; never passes C(-f) to mkfs.
  - On a built node every difference is reported. When one cannot be mended without risk to the data, nothing is
    changed; a mounted volume is never unmounted.
  - Mounts it by UUID through /etc/fstab, so that a missing array neither blocks nor hangs a boot.
  - Writes a unit that mounts it when its array appears after the boot went on without it, once in a boot, and then
    starts what requires it.
  - Makes the bare mount point immutable, so that nobody writes to the root file system when the volume is absent.
  - Keeps named services from starting without the volume.
options:
  array:
    description: Name of the md array, C(/dev/md/NAME).
    type: str
    required: true
  array_uuid:
    description: Its UUID, where two arrays may have one name.
    type: str
    default: ""
  chunk_bytes:
    description: Chunk of the array in bytes; the data stripe unit.
    type: int
    required: true
  members:
    description: Number of the array's members that hold distinct data; the stripe width.
    type: int
    required: true
  adopt:
    description:
      - Keep a file system and its label even if the manifest names another UUID.
    type: bool
    default: false
  new_array:
    description: The array is made in this run, so an earlier manifest of the node no longer applies.
    type: bool
    default: false
  volumes:
    description:
      - Where there are several, RV(volumes) as tunetool.node.raid_array returned it. Each is mounted in a directory of
        its name under C(mount_point), has that name as its label, and has an offload directory of its own. O(array),
        O(chunk_bytes) and O(members) say nothing then.
    type: list
    elements: dict
    default: []
  project_quota:
    description:
      - Whether C(prjquota) is added to the mount options, which limits of jobs need (M(tunetool.node.job_scratch)). XFS
        takes it only when it is mounted, so on a built node it is a difference until the volume is unmounted.
    type: bool
    default: false
  settings:
    description:
      - The variables of the role P(tunetool.node.scratch_filesystem#role) without its name; C(mount_point) is required.
      - A file system whose bare mount point cannot be made immutable (tmpfs, overlay) gives a warning.
    type: dict
    required: true
extends_documentation_fragment: [tunetool.node.changes]
author:
  - The tunetool authors (@tunetool)
attributes:
  diff_mode:
    description: Shows the file system, /etc/fstab, the mount, the directories and the drop-ins before and after.
    support: full
"""

EXAMPLES = r"""
- name: Put XFS on the array
  tunetool.node.scratch_filesystem:
    array: nvme_raid0
    chunk_bytes: 1048576
    members: 8
    settings:
      mount_point: /mnt/nvme_raid0
      offload_dir: /mnt/nvme_raid0/deepspeed_offload
"""

RETURN = r"""
differences:
  description:
    - On a built node, what is not as asked. C(mended) is false for what was left, with a C(hint).
  returned: always
  type: list
  elements: dict
filesystem:
  description: The file system as the manifest holds it. C(uuid) is null where check mode predicts it.
  returned: success
  type: dict
volumes:
  description:
    - Where there are several, each as the manifest holds it; else empty. One with C(left) is broken, and was left
      alone.
  returned: success
  type: list
  elements: dict
offload_dir:
  description: The directory, or null.
  returned: success
  type: str
offload:
  description: The directory's C(uid), C(gid) and C(mode) as the manifest holds them; empty without a directory.
  returned: success
  type: dict
"""

from typing import Any  # noqa: E402  (Ansible wants the documentation first)

from ..module_utils.array.md_arrays import read_arrays  # noqa: E402
from ..module_utils.common.drift import Ledger, built_manifest  # noqa: E402
from ..module_utils.common.refusal import Refusal  # noqa: E402
from ..module_utils.machine.drive_contents import plain_uuid  # noqa: E402
from ..module_utils.machine.file_system import BUILT  # noqa: E402
from ..module_utils.play.convergence import AnsibleModule, converge  # noqa: E402
from ..module_utils.volume.apply import ARGUMENTS, Volume  # noqa: E402
from ..module_utils.volume.offload_access import asked  # noqa: E402
from ..module_utils.volume.several import Volumes, as_built  # noqa: E402
from ..module_utils.volume.volume_values import volume_problems  # noqa: E402


def work(module: AnsibleModule, ledger: Ledger) -> tuple[str | None, str | None, list[dict[str, Any]]]:
    """Find the array, compare everything that is asked, and change what differs."""
    if module.params["volumes"]:
        return None, None, Volumes(module.params, ledger, predicting=module.check_mode).all()
    name = module.params["array"]
    uuid = plain_uuid(module.params["array_uuid"])
    # Two arrays may have one name: another host's keeps its own.
    array = next(
        (array for array in read_arrays() if array.name == name and (not uuid or plain_uuid(array.uuid) == uuid)), None
    )
    if array is None and not module.check_mode:
        raise Refusal("array `%s` is not assembled. hint: run raid_array first" % name)
    return (*Volume(module.params, ledger, array).all(), [])


def access(wanted: dict[str, Any]) -> dict[str, Any]:
    """Who may use the offload directory; empty where check mode has reported a user or group that is not there."""
    try:
        return asked(wanted)
    except KeyError:
        return {}


def main() -> None:
    """Entry point: check the arguments, do the job, report."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    geometry = BUILT.geometry(module.params["chunk_bytes"], module.params["members"])
    problems = volume_problems(module.params, geometry.log_su_bytes)
    if problems:
        module.fail_json(msg="; ".join(problems))
    (uuid, offload_dir, volumes), answer = converge(
        module,
        lambda ledger: work(module, ledger),
        lambda: None if module.params["new_array"] else built_manifest(),
        {ValueError: str},
    )
    module.exit_json(
        filesystem=as_built(module.params, geometry, uuid),
        volumes=volumes,
        offload_dir=offload_dir,
        offload=access(module.params) if offload_dir or (volumes and module.params["offload_dir"]) else {},
        **answer,
    )


if __name__ == "__main__":
    main()
