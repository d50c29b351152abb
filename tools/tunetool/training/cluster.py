"""The ranks of a fine-tune: on which hosts, how many on each, started by what."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.launch.choose import launcher as choose
from tunetool.launch.hosts import Host, from_inventory
from tunetool.launch.job import Job, Launcher
from tunetool.measure import busy
from tunetool.measure.progress import MovingProgress, Progress
from tunetool.training.model import reference_model
from tunetool.training.preparation import Ready, gpus, prepare_here, prepare_on_hosts
from tunetool.training.settings import Cluster, Material

_TIMEOUT = 7 * 86400.0
"""No limit of ours: the watchdog ends what hangs."""
_STALL, _SLOWEST = 300.0, 20e6
"""Seconds without a step that no rank needs, and longer while it may read its model at so many bytes per second."""
_MAKING = 200e6
"""Bytes per second at which a progress bar expects model and images to be made."""


@dataclass(frozen=True)
class Place:
    """No hosts: this machine alone."""

    launcher: Launcher
    hosts: tuple[Host, ...]
    python: str | None = None

    @property
    def nodes(self) -> int:
        """How many."""
        return max(1, len(self.hosts))

    def job(self, ranks_per_host: int, directory: Path, model_bytes: int = 0) -> Job:
        """For ``run_workload``. ``directory`` is on this machine."""
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


def find_place(cluster: Cluster, progress: Progress) -> Place:
    """Raises ``UsageProblem``."""
    hosts = () if cluster.inventory is None else tuple(from_inventory(cluster.inventory, cluster.limit))
    chosen = choose(cluster.launcher, cluster.inventory, cluster.limit, progress, cluster.slurm)
    return Place(chosen, hosts, cluster.python)


def prepare_nodes(
    material: Material, place: Place, directory: Path, progress: MovingProgress, look: bool
) -> list[Ready]:
    """Model and data on every node, and nobody else at work there. ``directory``: for what launched ranks leave.

    ``look``: whether anybody looks. Raises ``TunetoolError``.
    """
    if place.hosts:
        size = reference_model.describe(material.model).bytes if material.model in reference_model.SIZES else 0
        job = place.job(1, directory, size)
        ready = prepare_on_hosts(material, place.launcher, job, progress, look, size / _MAKING)
    else:
        ready = [prepare_here(material, socket.gethostname(), progress, look)]
    busy.refuse([f"{each.host}: {line}" if place.hosts else line for each in ready for line in each.busy])
    return ready


def need_gpus(cluster: Cluster, environment: Mapping[str, str]) -> None:
    """Before any work on this machine. Raises ``CannotJudge`` where GPUs are asked for that it has not."""
    if cluster.inventory is None and cluster.device == "cuda":
        _enough("this machine", gpus(environment), cluster.ranks_per_node or 1)


def ranks_here(cluster: Cluster, environment: Mapping[str, str]) -> tuple[int, bool]:
    """How many ranks this machine gets, and whether they compute on its CPUs."""
    there = gpus(environment)
    on_cpu = cluster.device == "cpu" or (cluster.device == "auto" and there == 0)
    return cluster.ranks_per_node or (1 if on_cpu else there), on_cpu


def ranks_per_host(cluster: Cluster, hosts: Sequence[Host], ready: Sequence[Ready]) -> int:
    """As asked for, else what the inventory allows and the poorest node has. Raises ``CannotJudge``."""
    there = min(each.gpus for each in ready)
    if cluster.device == "cuda":
        for each in ready:
            _enough(f"`{each.host}`", each.gpus, cluster.ranks_per_node or 1)
    if cluster.ranks_per_node is not None:
        return cluster.ranks_per_node
    slots = [host.slots for host in hosts if host.slots is not None]
    if cluster.device == "cpu" or there == 0:
        return min(slots, default=1)
    return min([there, *slots])


def _enough(where: str, there: int, needed: int) -> None:
    if there < needed:
        has = "no GPU" if there == 0 else f"{there} GPU(s), and {needed} ranks need one each"
        raise CannotJudge(
            f"{where} has {has}",
            "train on `--device cpu`; where a GPU should be, see `nvidia-smi` and CUDA_VISIBLE_DEVICES",
        )
