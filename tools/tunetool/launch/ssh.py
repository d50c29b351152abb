"""torchrun on the hosts of an inventory, started over ssh by Ansible."""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from tunetool.errors import UsageProblem
from tunetool.fleet.playbook import HostSelection, Run, find_playbook, play
from tunetool.launch.job import PLAYBOOK, Host, Job, from_inventory
from tunetool.launch.local import RankFailed
from tunetool.launch.spec import NodeSpec, Verdict, verdict_of
from tunetool.launch.this_machine import judge
from tunetool.measure.progress import Progress
from tunetool.node.common.commands import last_line
from tunetool.node.play.host_summary import one_line
from tunetool.node.play.reasons import why_unreachable

_ALIVE = "-o ServerAliveInterval=5 -o ServerAliveCountMax=2"
"""A host that vanished ends its connection within 10 s, instead of the kernel's quarter of an hour."""


class InventoryLauncher:
    """A launcher over the hosts of an inventory."""

    def __init__(self, selection: HostSelection, progress: Progress) -> None:
        self._selection = selection
        self._progress = progress

    def _hosts(self, job: Job) -> Sequence[Host]:
        """The job's hosts, or all of the selection. Raises ``UsageProblem`` if one has too few slots for its ranks."""
        hosts = job.hosts or from_inventory(self._selection)
        for host in hosts:
            if host.slots is not None and job.ranks_per_host > host.slots:
                raise UsageProblem(
                    f"`{host.name}` takes {host.slots} ranks, not {job.ranks_per_host}", "see its `tunetool_slots`"
                )
        return hosts


class SshLauncher(InventoryLauncher):
    """Runs one play that starts a guard on every host; each guard starts torchrun."""

    name = "ssh"

    def run(self, job: Job, tick: Callable[[], None]) -> None:
        """See ``tunetool.launch.job.Launcher``. A job without hosts runs on all hosts of the inventory."""
        judge(Guards(self._selection, job, self._hosts(job), "torchrun").run(tick), self._progress)


class Guards:
    """The guards of one run, one on each host."""

    def __init__(
        self,
        selection: HostSelection,
        job: Job,
        hosts: Sequence[Host],
        engine: Literal["torchrun", "other"],
    ) -> None:
        self.prepared: dict[str, list[int]] = {}
        """Two free ports of each prepared host: one for the rendezvous of the ranks, one for the guards."""
        self.spec = NodeSpec(
            run=secrets.token_hex(16),
            directory=f"/tmp/tunetool-launch-{secrets.token_hex(8)}",
            out="",
            hosts=[host.name for host in hosts],
            node=0,
            ranks_per_host=job.ranks_per_host,
            program=list(job.program),
            python=job.python or "",
            environment=dict(job.environment),
            engine=engine,
            timeout=job.timeout,
            stall=job.stall,
        )
        self._selection = selection
        self._job = job
        self._hosts = hosts
        self._verdicts: dict[str, Verdict] = {}
        self._refused: dict[str, str] = {}
        self._unreachable: dict[str, str] = {}

    def run(self, tick: Callable[[], None]) -> list[Verdict]:
        """Until the run ended on all hosts; outputs are brought. Raises ``RankFailed`` where hosts have no verdict and
        no other host's names the cause."""
        self._job.directory.mkdir(parents=True, exist_ok=True)
        fetched = Path(tempfile.mkdtemp(prefix=".fetched-", dir=self._job.directory.resolve()))
        try:
            self._play(tick, {"launch_fetch": str(fetched)})
        except BaseException:
            # The guards have lost their connection by now and end by themselves; this waits for them and cleans up.
            with contextlib.suppress(Exception):
                self._play(lambda: None, {"launch_phase": "clean", "launch_fetch": str(fetched)})
            raise
        finally:
            for host in self._hosts:
                unpack(fetched / f"{host.name}.tar", self._job.directory)
            shutil.rmtree(fetched, ignore_errors=True)
        return self._checked_verdicts()

    def _play(self, tick: Callable[[], None], more: Mapping[str, object]) -> None:
        names = [host.name for host in self._hosts]
        variables = {
            "launch_hosts": names,
            "launch_addresses": [host.address for host in self._hosts],
            "launch_directory": self.spec.directory,
            "launch_spec": base64.b64encode(json.dumps(asdict(self.spec)).encode()).decode(),
            **more,
        }
        if self._job.python is not None:
            variables["launch_python"] = self._job.python
        environment = {"ANSIBLE_SSH_EXTRA_ARGS": _ALIVE}
        playbook = find_playbook(PLAYBOOK, self._selection.ansible)
        run = Run(playbook, self._selection.inventory, ",".join(names), len(names), variables, environment=environment)
        play(run, self._on_event, tick)

    def _on_event(self, kind: str, data: Mapping[str, Any]) -> None:
        if kind not in ("runner_on_ok", "runner_on_failed", "runner_on_unreachable"):
            return
        host, result = str(data.get("host")), data.get("res") or {}
        if kind == "runner_on_unreachable":
            # Ansible's own words first, then those of ssh.
            said = last_line(str(result.get("msg") or ""), "it does not answer")
            self._unreachable.setdefault(host, why_unreachable(said[:300]))
        elif "verdict" in result:
            self._verdicts[host] = verdict_of(result["verdict"])
        elif kind == "runner_on_failed" or (result.get("failed_when_result") is False and "ports" not in result):
            # A task failed; the play continues on this host, to clean it up.
            self._refused.setdefault(host, one_line(str(result.get("msg") or "Ansible failed")))
        elif "ports" in result:
            self.prepared[host] = list(result["ports"])

    def _checked_verdicts(self) -> list[Verdict]:
        verdicts = list(self._verdicts.values())
        silent = [host.name for host in self._hosts if host.name not in self._verdicts]
        for name in silent:
            if name in self._refused:
                message, _, hint = self._refused[name].partition(". hint: ")
                raise RankFailed(f"host `{name}`: {message}", hint or None, host=name)
        if silent and not any(verdict.failure for verdict in verdicts):
            name = next((name for name in silent if name in self._unreachable), silent[0])
            why = self._unreachable.get(name, "no answer came from it")
            raise RankFailed(f"host `{name}` is lost: {why}", f"look at it: `ssh {name} uptime`", host=name)
        return verdicts


def unpack(archive: Path, directory: Path) -> None:
    """The files of an archive from a host; what would land outside of ``directory``, or is no file, is left out."""
    if not archive.exists():
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            name = PurePosixPath(member.name)
            if not member.isreg() or name.is_absolute() or ".." in name.parts:
                continue
            content = tar.extractfile(member)
            assert content is not None  # noqa: S101  (a regular file)
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as stream:
                shutil.copyfileobj(content, stream)
