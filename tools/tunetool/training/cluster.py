"""The ranks of a fine-tune: their hosts, their number per host, and the launcher that starts them."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.fleet.playbook import HostSelection
from tunetool.launch.choose import launcher as choose
from tunetool.launch.job import Host, Job, Launcher, from_inventory
from tunetool.measure import busy
from tunetool.measure.progress import MovingProgress, Progress
from tunetool.training.model import reference_model
from tunetool.training.preparation import Ready, gpus, prepare_here, prepare_on_hosts
from tunetool.training.workload import Cluster, Material

_TIMEOUT = 7 * 86400.0
"""Seconds; practically no limit, since the watchdog ends a run that hangs."""
_STALL, _SLOWEST = 300.0, 20e6
"""The watchdog's limit in seconds without a step, and the slowest reading of the model (bytes per second) that it
allows on top."""
_MAKING = 200e6
"""Estimated speed of making model and images, bytes per second, for the progress bar."""


@dataclass(frozen=True)
class Machines:
    """Where the ranks run: the launcher, its hosts (none: this machine), and the hosts' interpreter."""

    launcher: Launcher
    hosts: tuple[Host, ...]
    python: str | None = None

    @property
    def nodes(self) -> int:
        """Number of nodes, at least 1."""
        return max(1, len(self.hosts))

    def job(self, ranks_per_host: int, directory: Path, model_bytes: int = 0) -> Job:
        """A job for ``run_workload``. ``directory``: where results go on this machine; ``model_bytes``: its size."""
        return Job(
            program=(),
            ranks_per_host=ranks_per_host,
            environment={},
            directory=directory,
            hosts=self.hosts,
            python=self.python,
            timeout=_TIMEOUT,
            stall=_STALL + model_bytes / _SLOWEST,
        )


def find_machines(cluster: Cluster, progress: Progress) -> Machines:
    """The hosts and the launcher that the settings choose. Raises ``UsageProblem`` where none fits."""
    hosts: tuple[Host, ...] = ()
    if cluster.inventory is not None:
        hosts = tuple(from_inventory(HostSelection(cluster.inventory, cluster.limit, ansible=cluster.ansible)))
    chosen = choose(cluster.launcher, cluster.inventory, cluster.limit, progress, cluster.slurm, cluster.ansible)
    return Machines(chosen, hosts, cluster.python)


def prepare_nodes(
    material: Material, machines: Machines, directory: Path, progress: MovingProgress, look: bool
) -> list[Ready]:
    """Prepare model and data on every node, and refuse nodes with other work. ``directory``: output of launched ranks.

    ``look``: watch the devices for other work. Raises ``TunetoolError``.
    """
    if machines.hosts:
        size = reference_model.describe(material.model).bytes if material.model in reference_model.SIZES else 0
        job = machines.job(1, directory, size)
        ready = prepare_on_hosts(material, machines.launcher, job, progress, look, size / _MAKING)
    else:
        ready = [prepare_here(material, socket.gethostname(), progress, look)]
    busy.refuse([f"{each.host}: {line}" if machines.hosts else line for each in ready for line in each.busy])
    return ready


def need_gpus(cluster: Cluster, environment: Mapping[str, str]) -> None:
    """Raise ``CannotJudge`` where the settings need GPUs that this machine does not have."""
    if cluster.inventory is None and cluster.device == "cuda":
        _enough("this machine", gpus(environment), cluster.ranks_per_node or 1)


def ranks_here(cluster: Cluster, environment: Mapping[str, str]) -> tuple[int, bool]:
    """The number of ranks on this machine, and whether they compute on its CPUs."""
    available = gpus(environment)
    on_cpu = cluster.device == "cpu" or (cluster.device == "auto" and available == 0)
    return cluster.ranks_per_node or (1 if on_cpu else available), on_cpu


def ranks_per_host(cluster: Cluster, hosts: Sequence[Host], ready: Sequence[Ready]) -> int:
    """The number of ranks per host: the setting, or else the least of the inventory's slots and the nodes' GPUs.

    Raises ``CannotJudge`` where a node lacks GPUs that the settings need.
    """
    fewest_gpus = min(node.gpus for node in ready)
    if cluster.device == "cuda":
        for node in ready:
            _enough(f"`{node.host}`", node.gpus, cluster.ranks_per_node or 1)
    if cluster.ranks_per_node is not None:
        return cluster.ranks_per_node
    slots = [host.slots for host in hosts if host.slots is not None]
    if cluster.device == "cpu" or fewest_gpus == 0:
        return min(slots, default=1)
    return min([fewest_gpus, *slots])


def _enough(where: str, available: int, needed: int) -> None:
    if available < needed:
        has = "no GPU" if available == 0 else f"{available} GPU(s), and {needed} ranks need one each"
        raise CannotJudge(
            f"{where} has {has}",
            "train on `--device cpu`; if there should be a GPU, see `nvidia-smi` and CUDA_VISIBLE_DEVICES",
        )
