"""The description of a job, and the interface of launchers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tunetool.launch.hosts import Host


@dataclass(frozen=True)
class Job:
    """One program that runs on ``ranks_per_host`` ranks of each host.

    ``program``: arguments for torchrun, ``("-m", "package.module", *arguments)`` or ``("script.py", *arguments)``.
    ``environment``: additional variables for the ranks. ``directory``: a directory on the control machine. Files that a
    rank writes to its ``tunetool.launch.rank.out()`` are in ``directory/rank-<RANK>`` afterwards, with its output in
    ``stdout.log`` and ``stderr.log``; also after a failure, as far as they exist.
    Without ``hosts``, the job runs on this machine. ``python``: the interpreter on the hosts; default: the current one
    for this machine; elsewhere the one that the host's manifest names for training, else /opt/tunetool/bin/python.
    ``timeout``: time limit of the run in seconds. ``stall``: seconds without a beat of any rank
    (``tunetool.launch.rank.beat``) after which every rank's stack is dumped to its ``stack.txt`` and all are ended.
    """

    program: Sequence[str]
    ranks_per_host: int
    environment: Mapping[str, str]
    directory: Path
    hosts: Sequence[Host] = ()
    python: str | None = None
    timeout: float = 3600.0
    stall: float = 300.0


class Launcher(Protocol):
    """An engine that starts ranks: ``local``, ``ssh`` (torchrun over ssh by Ansible), ``deepspeed``, ``slurm``."""

    @property
    def name(self) -> str:
        """The name of the launcher on the command line."""

    def run(self, job: Job, tick: Callable[[], None]) -> None:
        """Run the job until all ranks have succeeded; ``tick`` is called repeatedly.

        Raises ``tunetool.launch.local.RankFailed``, which names the rank and its host. Nothing of the run remains on
        any node (no process, no file in /dev/shm, no directory), also after an error or Ctrl-C.
        """
