"""Ansible's module class, for modules that show what they read on a node."""

from __future__ import annotations

import os
from typing import Any

from ansible.module_utils import basic

from ..common.files import UMASK, printable


class AnsibleModule(basic.AnsibleModule):  # type: ignore[misc]  # ansible-core comes without types
    """A module whose results are always UTF-8.

    A file or a name on a node may hold any bytes, and ansible-core 2.19 takes no result with one that is not: the task
    would fail after its work is done, and again at every later run.

    A failure after ``change_begins`` says that the node was changed.

    What a module and the programs that it starts make on a node is for every user to read, though root's umask may be
    077. ``keep_umask``: for a module that works for the user who called it.
    """

    _changing = False

    def __init__(self, *arguments: Any, keep_umask: bool = False, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # The variables of a role, which come as one dictionary, are parameters like all others.
        self.params.update(self.params.get("settings") or {})
        if not keep_umask:
            os.umask(UMASK)

    def change_begins(self) -> None:
        """Called before each write to the node."""
        self._changing = True

    def exit_json(self, **kwargs: Any) -> None:
        """End the module, without error."""
        super().exit_json(**printable(kwargs))

    def fail_json(self, msg: str, **kwargs: Any) -> None:
        """End the module, with an error."""
        if self._changing:
            kwargs["changed"] = True
        super().fail_json(printable(msg), **printable(kwargs))

    def warn(self, warning: str, **kwargs: Any) -> None:
        """Add a warning to the result."""
        super().warn(printable(warning), **kwargs)
