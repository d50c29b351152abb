"""What is to run, and who can run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tunetool.launch.hosts import Host


@dataclass(frozen=True)
class Job:
    """One program on ``ranks_per_host`` ranks of each host.

    ``program`` is what torchrun takes: ``("-m", "package.module", *arguments)`` or ``("script.py", *arguments)``.
    ``environment`` is for the ranks alone. ``directory`` is on the control machine: what a rank writes into its
    ``tunetool.launch.rank.out()`` is found in ``directory/rank-<RANK>`` afterwards, with what it printed in
    ``stdout.log`` and ``stderr.log``; after a failure too, as far as there is something.
    No ``hosts``: this machine alone. ``python`` is the interpreter on the hosts; by default this one for this machine,
    /opt/tunetool/bin/python elsewhere.
    ``timeout``: seconds for the whole run. ``stall``: seconds without a beat of any rank
    (``tunetool.launch.rank.beat``) until every rank's stack is dumped into its ``stack.txt`` and all are ended.
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
        """As it is called on the command line."""

    def run(self, job: Job, tick: Callable[[], None]) -> None:
        """Until all ranks ended well; ``tick`` is called often meanwhile.

        Raises ``tunetool.launch.local.RankFailed``, which names the rank and its host. Afterwards nothing of the run is
        left on any node: no process, no file in /dev/shm, no directory; on an error and on Ctrl-C too.
        """
