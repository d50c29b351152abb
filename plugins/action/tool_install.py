# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Action plugin: send the wheelhouse only to a node that lacks it; then the module installs from it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

MODULE = "tunetool.node.tool_install"


class ActionModule(ActionBase):  # type: ignore[misc]  # Ansible ships no types
    """One round trip to a node that has the program, three to one that lacks it."""

    TRANSFERS_FILES = (
        False  # otherwise Ansible makes and removes a directory on the node in every run: three round trips
    )

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask the node, then send and install."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        check = self._task.check_mode
        arguments = dict(self._task.args)
        self._task.check_mode = True
        try:
            asked = self._execute_module(module_name=MODULE, module_args=arguments, task_vars=task_vars)
        finally:
            self._task.check_mode = check
        if check or asked.get("failed") or not asked.get("changed"):
            result.update(asked)
            return result
        sent = ""
        # The module says by this entry that it has to install.
        if any(entry["before_header"] == "tunetool" for entry in asked.get("diff") or []):
            archive = str(arguments["archive"])
            if not Path(archive).is_file():
                result.update(failed=True, msg=f"`{archive}` is not on this machine. hint: see the task before")
                return result
            sent, problem = self._send(archive, str(arguments.get("prefix") or "/opt/tunetool"))
            if problem:
                result.update(failed=True, msg=f"the wheelhouse cannot be sent: {problem}. hint: is the disk full?")
                return result
            arguments["archive"] = sent
        result.update(self._execute_module(module_name=MODULE, module_args=arguments, task_vars=task_vars))
        return result

    def _send(self, archive: str, prefix: str) -> tuple[str, str]:
        """The archive's path on the node, and the problem, if there was one.

        Through the standard input of one command, as Ansible itself sends a pipelined module: `copy` takes seven round
        trips. Nothing trusts a file that a cut connection left there: it is sent again while the key is not installed.
        """
        if not self._is_pipelining_enabled("new"):
            # A sudo that wants a terminal, or a connection plugin without standard input.
            directory = self._connection._shell.tmpdir or self._make_tmp_path()
            remote = self._connection._shell.join_path(directory, os.path.basename(archive))
            self._transfer_file(archive, remote)
            return remote, ""
        remote = f"{prefix}/wheelhouse.tar"
        made = f"install -d -o root -g root -m 0755 {shlex.quote(prefix)}"
        written = (
            f"(umask 022 && cat > {shlex.quote(remote)}.new) && mv -f {shlex.quote(remote)}.new {shlex.quote(remote)}"
        )
        done = self._low_level_execute_command(f"{made} && {written}", in_data=Path(archive).read_bytes())
        return remote, "" if done["rc"] == 0 else " ".join(str(done["stderr"] or done["stdout"]).split())
