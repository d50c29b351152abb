#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: watch the rebuild of an array that got another drive, for a bounded time."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: array_rebuild
short_description: Watch the rebuild of the scratch array for a bounded time
version_added: "0.1.0"
description:
  - Waits until every member of the manifest's array has all of its data, at most O(seconds). Changes nothing.
  - Fails where the array no longer serves, and where a member has no drive and nothing is being filled.
options:
  seconds:
    description: How long it waits, in seconds.
    type: float
    default: 0
extends_documentation_fragment: [tunetool.node.read_only]
author:
  - The tunetool authors (@tunetool)
"""

EXAMPLES = r"""
- name: Watch the rebuild for a minute
  tunetool.node.array_rebuild:
    seconds: 60
"""

RETURN = r"""
done:
  description: Whether every member has all of its data.
  returned: success
  type: bool
msg:
  description: How far it is, with the minutes that are left at its present speed.
  returned: always
  type: str
"""

from ..module_utils.array.drive_volumes import ALL, groups_of  # noqa: E402  (Ansible wants the documentation first)
from ..module_utils.array.md_arrays import find, read_arrays  # noqa: E402
from ..module_utils.common.drift import built_manifest  # noqa: E402
from ..module_utils.common.refusal import Refusal  # noqa: E402
from ..module_utils.common.waiting import wait_for  # noqa: E402
from ..module_utils.play.convergence import READING, AnsibleModule, in_one_line  # noqa: E402


def main() -> None:
    """Wait, and say how far it is."""
    module = AnsibleModule(argument_spec={"seconds": {"type": "float", "default": 0}}, supports_check_mode=True)
    with in_one_line(module, READING):
        manifest = built_manifest()
        if manifest and groups_of(manifest) != ALL:
            module.exit_json(changed=False, done=True, msg="the node has several volumes, and nothing is rebuilt")
        uuid = manifest["array"]["uuid"] if manifest else None

        def over() -> bool:
            array = find(read_arrays(), uuid)
            return array is None or not array.degraded

        wait_for(over, module.params["seconds"], 1.0)
        array = find(read_arrays(), uuid)
        if array is None or not array.serves:
            fault = array.fault if array else "the manifest's array is not assembled: run `tunetool verify`"
            raise Refusal(str(fault).replace(": ", ". hint: ", 1))
        if array.degraded and not array.rebuilding:
            raise Refusal("array `%s` is degraded and nothing is being filled. hint: see `dmesg`" % array.device)
    if not array.degraded:
        module.exit_json(changed=False, done=True, msg="array `%s`: every member has all of its data" % array.device)
    progress = str(array.sync) if array.sync else "about to begin"
    module.exit_json(changed=False, done=False, msg="array `%s`: the rebuild is at %s" % (array.device, progress))


if __name__ == "__main__":
    main()
