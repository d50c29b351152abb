# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""A line per host at the end of a run."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from ansible import constants, context
from ansible.plugins.callback import CallbackBase
from ansible.template import Templar

from ..module_utils.common.files import replace_file
from ..module_utils.play.host_summary import BUILD, Route, Summary, Trips, document, lines

DOCUMENTATION = """
name: host_summary
type: aggregate
short_description: Print one line for each host at the end of a run
description:
  - Prints one line for each host with its status, the number of tasks that ran and that changed it, their round trips
    to the host, their seconds, and the reason with its hint if one failed.
  - Round trips are counted from Ansible's own log of what its connection plugins start, never from the number of tasks.
    That log needs O(log_path) (C(/dev/null) is enough) and C(log_verbosity=3) in C([defaults]), and ansible-core 2.17;
    without them, and where two hosts share one address and port, the column shows C(-).
requirements:
  - enable it in ansible.cfg with C(callbacks_enabled = tunetool.node.host_summary)
options:
  file:
    description: Also write the summary there, as JSON.
    type: str
    default: ""
    env: [{name: TUNETOOL_SUMMARY_FILE}]
    ini: [{section: callback_host_summary, key: file}]
author: The tunetool authors (@tunetool)
"""

_LOGGED_FROM = 3
_SSH = frozenset({"ssh", "smart", "ansible.builtin.ssh"})
_ROLE_THAT_ENDS_A_BUILD = "tunetool"


class _Listener(logging.Handler):
    """Log handler that receives Ansible's own log lines."""

    def __init__(self, trips: Trips) -> None:
        super().__init__()
        self._trips = trips

    def emit(self, record: logging.LogRecord) -> None:
        self._trips.line(record.getMessage())


class CallbackModule(CallbackBase):  # type: ignore[misc]  # Ansible ships no types
    """Collects the results of each host, and prints a line for each at the end."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "tunetool.node.host_summary"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self, display: Any = None, options: Any = None) -> None:
        super().__init__(display, options)
        self._summary = Summary(check=bool(context.CLIARGS.get("check")))
        self._trips = Trips()
        self._play: Any = None
        self._started: dict[tuple[str, str], float] = {}
        self._listener = _Listener(self._trips)
        logging.getLogger("ansible").addHandler(self._listener)

    def v2_playbook_on_play_start(self, play: Any) -> None:
        """Note the job of the run. Without tags a build counts as done only after its last role."""
        self._play = play
        whole = list(context.CLIARGS.get("tags") or ["all"]) == ["all"] and not context.CLIARGS.get("skip_tags")
        names = [str(role.get_name(include_role_fqcn=False)).rsplit(".", 1)[-1] for role in play.get_roles()]
        if whole and _ROLE_THAT_ENDS_A_BUILD in names:
            self._summary.goal = BUILD

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        """Start the clock of one task on one host."""
        self._started[(host.get_name(), task._uuid)] = time.monotonic()
        self._summary.host(host.get_name())
        if not self._trips.knows(host.get_name()):
            self._trips.goes(host.get_name(), self._route(host))

    def v2_runner_on_ok(self, result: Any) -> None:
        """Count a task that succeeded."""
        self._summary.ok(*self._heard(result))

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """Record the reason."""
        (self._summary.ok if ignore_errors else self._summary.failed)(*self._heard(result))

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """Record the reason."""
        name, _action, answer, seconds = self._heard(result)
        self._summary.unreachable(name, answer, seconds)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Print the table, below Ansible's own recap."""
        logging.getLogger("ansible").removeHandler(self._listener)
        if not any(host.tasks or host.reason for host in self._summary.hosts.values()):
            return
        for name, host in self._summary.hosts.items():
            totals = stats.summarize(name)
            if host.reason and not totals["failures"] and not totals["unreachable"] and totals["rescued"]:
                self._summary.recovered(name)
            host.trips = self._trips.of(name) if self._logged() else None
        hosts = list(self._summary.hosts.values())
        self._display.banner("HOSTS")
        for line in lines(hosts):
            self._display.display(line)
        path = self.get_option("file")
        if path:
            replace_file(path, json.dumps(document(hosts), indent=1) + "\n", mode=0o644)

    def _heard(self, result: Any) -> tuple[str, str, Mapping[str, Any], float]:
        name, task = result._host.get_name(), result._task
        started = self._started.pop((name, task._uuid), None)
        seconds = time.monotonic() - started if started is not None else 0.0
        # A delegated task runs on another machine.
        action = "ansible.builtin.meta" if task.delegate_to else str(task.action)
        return name, action, result._result, seconds

    def _route(self, host: Any) -> Route:
        variables = self._play.get_variable_manager().get_vars(play=self._play, host=host)
        templar = Templar(loader=self._play.get_loader(), variables=variables)
        wanted = ("ansible_connection", "ansible_host", "ansible_port")
        given = {name: templar.template(variables[name]) for name in wanted if name in variables}
        connection = str(given.get("ansible_connection") or self._play.connection or constants.DEFAULT_TRANSPORT)
        ssh = connection in _SSH
        port = given.get("ansible_port") if ssh else None
        return Route(ssh, str(given.get("ansible_host") or host.address), int(port) if port else None)

    @staticmethod
    def _logged() -> bool:
        return bool(constants.DEFAULT_LOG_PATH) and (getattr(constants, "LOG_VERBOSITY", None) or 0) >= _LOGGED_FROM
