# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Action plugin: write the answers of all hosts of a play into one plan file on the control machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ansible.parsing.dataloader import DataLoader
from ansible.plugins.action import ActionBase

from ..module_utils.common.files import refuse_irregular, replace_file
from ..module_utils.plan.plan_file import PROVISION, REPLACE, TEARDOWN, document, dump

COLLECTION = Path(__file__).resolve().parents[2]
RESULTS = {PROVISION: "nvme_drives_result", TEARDOWN: "teardown_result", REPLACE: "replace_drive_result"}
"""Variable in which each job's role leaves the host's part of the plan."""


class ActionModule(ActionBase):  # type: ignore[misc]  # Ansible ships no types
    """Collects results; never connects. The argument ``job``: the playbook that the plan is for."""

    TRANSFERS_FILES = False
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Write the file, and name the hosts that are not in it."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        job = str(self._task.args.get("job", PROVISION))
        hosts, absent = {}, []
        for name in variables["ansible_play_hosts_all"]:
            part = (variables["hostvars"][name].get(RESULTS[job]) or {}).get("plan")
            if part is None:
                absent.append(str(name))
            else:
                hosts[str(name)] = part
        path = os.path.abspath(os.path.expanduser(str(self._task.args["path"])))
        # Neither the built collection nor the one in tunetool's wheel has galaxy.yml.
        version = DataLoader().load_from_file(str(COLLECTION / "roles/tunetool/vars/main.yml"))["_tunetool_version"]
        text = dump(document(hosts, str(version), job=job))
        if not os.path.isdir(os.path.dirname(path)):
            result.update(failed=True, msg=f"`{path}` is in no directory that exists. hint: give another `plan_file`")
            return result
        try:
            if self._task.check_mode:
                refuse_irregular(path)
            else:
                replace_file(path, text, mode=0o600)
                os.chmod(path, 0o600)
        except OSError as error:
            result.update(
                failed=True, msg=f"`{path}` cannot be written: {error.strerror}. hint: give another `plan_file`"
            )
            return result
        result["hosts"] = sorted(hosts)
        result["left_out"] = absent
        result["msg"] = f"plan for {len(hosts)} host{'s' if len(hosts) != 1 else ''} in `{path}`" + (
            f"; left out, because they did not answer: {', '.join(absent)}" if absent else ""
        )
        # The nodes are unchanged, and the file on this machine is the requested output: not a change.
        result["changed"] = False
        return result
