"""Runs ranks with DeepSpeed's launcher over a hostfile; guards watch the ranks and fetch their output as for ``ssh``.

``deepspeed`` starts the ranks through pdsh. The guard of each node passes program and environment to the ranks in a
file: DeepSpeed (0.19.8) passes both as text in a shell command line, where a quote or a dollar sign changes them.
The ``deepspeed`` process gets no signal: it would then end every DeepSpeed launch on the same hosts, by ``pkill -f``.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunetool.errors import UsageProblem
from tunetool.fleet import ansible_options
from tunetool.fleet.playbook import find_playbook
from tunetool.launch.job import PLAYBOOK, Host, Job, host_variables, shown
from tunetool.launch.local import RankFailed, tail
from tunetool.launch.ssh import Guards, InventoryLauncher
from tunetool.launch.this_machine import judge
from tunetool.measure.marked_processes import swept_away
from tunetool.measure.worker import describe_end
from tunetool.system_packages import install_line
from tunetool.training_python import choose

_MARK = "TUNETOOL_LAUNCHER"
_VERDICT_SECONDS = 20.0
"""Seconds that the guards have to report a failed rank after DeepSpeed has ended."""


def need_pdsh() -> str:
    """The path of pdsh. Raises ``UsageProblem`` where it is missing."""
    program = shutil.which("pdsh")
    if program is None:
        raise UsageProblem("`pdsh` is not on PATH", f"DeepSpeed connects to hosts with it: {install_line('pdsh')}")
    return program


class DeepspeedLauncher(InventoryLauncher):
    """Runs ``deepspeed --hostfile`` on this machine, which needs ssh access without a password to every host."""

    name = "deepspeed"

    def run(self, job: Job, tick: Callable[[], None]) -> None:
        """See ``tunetool.launch.job.Launcher``. A job without hosts runs on all hosts of the inventory.

        ``job.python`` must have the same path here and on every host: DeepSpeed starts ranks with its own interpreter.
        """
        need_pdsh()
        chosen = choose(job.python)
        if chosen.problem is not None:
            # DeepSpeed itself connects to the hosts.
            raise UsageProblem(f"DeepSpeed is to start the ranks: {chosen.problem.message}", chosen.problem.hint)
        # Not resolved: hosts have it at the same path by its own name only.
        python = job.python or (chosen.training.python if chosen.training is not None else str(chosen.path))
        job = replace(job, python=python)
        hosts = self._hosts(job)
        of_inventory = host_variables(self._selection.inventory, find_playbook(PLAYBOOK, self._selection.ansible))
        # As Ansible has it: an option is for hosts without a variable of their own.
        asked = ansible_options.for_ssh(self._selection.ansible)
        variables = {host.name: {**asked, **of_inventory.get(host.name, {})} for host in hosts}
        with tempfile.TemporaryDirectory(prefix="tunetool-launch-") as folder:
            local_dir = Path(folder)
            (local_dir / "hostfile").write_text(hostfile(hosts, job.ranks_per_host))
            config, arguments = ssh_settings(hosts, variables)
            (local_dir / "ssh_config").write_text(config)
            guards = Guards(self._selection, job, hosts, "other")
            with swept_away(_MARK, token := secrets.token_hex(16), local_dir):
                environment = chosen.environment({**os.environ, _MARK: token})
                environment["PDSH_SSH_ARGS_APPEND"] = shlex.join([*arguments, "-F", str(local_dir / "ssh_config")])
                started = _Deepspeed(guards, python, hosts, local_dir, environment)

                def watch() -> None:
                    tick()
                    started.watch()

                try:
                    verdicts = guards.run(watch)
                finally:
                    started.leave()
        judge(verdicts, self._progress)


class _Deepspeed:
    """The ``deepspeed`` process, which starts when every host is prepared."""

    def __init__(
        self, guards: Guards, python: str, hosts: Sequence[Host], local_dir: Path, environment: Mapping[str, str]
    ) -> None:
        self._guards = guards
        self._python = python
        self._hosts = hosts
        self._local_dir = local_dir
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: float | None = None

    def watch(self) -> None:
        """Start the process when all hosts are prepared. Raises ``RankFailed`` if it has ended without a guard's
        verdict."""
        if self._process is None:
            if len(self._guards.prepared) == len(self._hosts):
                self._process = self._start()
        elif self._process.poll() is not None:
            self._ended = self._ended or time.monotonic()
            if time.monotonic() - self._ended > _VERDICT_SECONDS:
                output = tail(self._local_dir / "log")
                message, hint = describe_end("`deepspeed`", self._process.returncode, output)
                raise RankFailed(message, hint, raw=output, host=self._hosts[0].name)

    def leave(self) -> None:
        """Wait a few seconds for the process, which ends once its ranks are gone; then kill it."""
        if self._process is not None:
            try:
                self._process.wait(3)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        port = self._guards.prepared[self._hosts[0].name][0]
        argv = command(
            self._python, self._local_dir / "hostfile", self._hosts[0].address, port, self._guards.spec.directory
        )
        with (self._local_dir / "log").open("wb") as log:
            return subprocess.Popen(
                argv,
                env=dict(self._environment),
                cwd="/",  # exists on every host: DeepSpeed changes to the same directory there
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def command(python: str, hosts: Path, address: str, port: int, directory: str) -> list[str]:
    """DeepSpeed's command line. ``directory``: the guards' directory, with the same path on every host."""
    meet = ["--master_addr", address, "--master_port", str(port)]
    # Without --force_multi, a single host means this machine; the ssh check ignores our ssh settings.
    how = ["--launcher", "pdsh", "--force_multi", "--no_ssh_check", "--no_local_rank"]
    rank = ["--module", "tunetool.launch.start", directory]
    return [python, "-m", "deepspeed.launcher.runner", "--hostfile", str(hosts), *meet, *how, *rank]


def hostfile(hosts: Sequence[Host], ranks_per_host: int) -> str:
    """The content of the hostfile: one line per host, in rank order."""
    return "".join(f"{host.name} slots={ranks_per_host}\n" for host in hosts)


def ssh_settings(hosts: Sequence[Host], variables: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Ansible's connection settings for plain ssh: the text of a configuration file, and further arguments.

    Raises ``UsageProblem`` for settings that pdsh cannot use.
    """
    common = {str(variables.get(host.name, {}).get("ansible_ssh_common_args", "")) for host in hosts}
    if len(common) > 1:
        raise UsageProblem(
            "hosts differ in `ansible_ssh_common_args`",
            "pdsh uses the same arguments for every host: use `--launcher ssh`",
        )
    try:
        arguments = shlex.split(common.pop())
    except ValueError as error:
        raise UsageProblem(f"`ansible_ssh_common_args` cannot be read: {error}", "close its quotation marks") from None
    included = ["~/.ssh/config", "/etc/ssh/ssh_config"]
    while "-F" in arguments[:-1]:
        at = arguments.index("-F")
        included = [] if arguments[at + 1] == "none" else [arguments[at + 1]]
        del arguments[at : at + 2]
    spaced = next((argument for argument in arguments if any(letter.isspace() for letter in argument)), None)
    if spaced is not None:
        raise UsageProblem(
            f"`{shown(spaced)}` in `ansible_ssh_common_args` has a space",
            "pdsh splits arguments at spaces: use `--launcher ssh`",
        )
    blocks = [_block(host, variables.get(host.name, {})) for host in hosts]
    always = ["Host *", "  BatchMode yes", "  ServerAliveInterval 5", "  ServerAliveCountMax 3"]
    return "\n".join([*blocks, *always, *(f"Include {path}" for path in included), ""]), arguments


def _block(host: Host, variables: Mapping[str, Any]) -> str:
    keys = {"User": "ansible_user", "Port": "ansible_port", "IdentityFile": "ansible_ssh_private_key_file"}
    # The way of ssh, which can be another than the one between the hosts.
    lines = [f"Host {host.name}"]
    for key, name in {"HostName": "ansible_host", **keys}.items():
        value = variables.get(name, host.name if key == "HostName" else None)
        if value is not None and "{{" in str(value):
            raise UsageProblem(f"`{name}` of `{host.name}` is a template: `{shown(value)}`", "give the value itself")
        if value is not None and (
            not isinstance(value, (str, int)) or not str(value).isprintable() or '"' in str(value)
        ):
            raise UsageProblem(f"`{name}` of `{host.name}` is `{shown(value)}`", "ssh takes words on one line")
        lines += [f'  {key} "{value}"'] if value is not None else []
    return "\n".join(lines)
