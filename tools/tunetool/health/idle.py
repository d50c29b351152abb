"""The rule by which a node is idle, so that its storage may be measured."""

from __future__ import annotations

from collections.abc import Iterator

from tunetool.node.common.files import read_text
from tunetool.node.machine.busy import gpu_holders, scheduler_jobs, volume_users

LOAD_SHARE = 0.05
"""Of the CPUs; a load of 1 is allowed on any node."""


def busy(mount_point: str | None, cpus: int, root: str = "/") -> str | None:
    """Why the node is not idle; None where it is. The cheapest question comes first.

    Idle: a load over five minutes of at most 5 % of the CPUs (or 1), no job of Slurm, no process that has a GPU open,
    and none that has a file of the volume open. ``verify`` itself then watches the drives for a second.
    """
    return next(_reasons(mount_point, cpus, root), None)


def _reasons(mount_point: str | None, cpus: int, root: str) -> Iterator[str]:
    load = _load(root)
    if load is None:
        yield "the load cannot be read"
    elif load > max(1.0, LOAD_SHARE * cpus):
        yield f"the load is {load:g}"
    yield from scheduler_jobs({}, root)
    yield from gpu_holders(root)
    if mount_point is not None:
        yield from volume_users(mount_point, root)


def _load(root: str) -> float | None:
    fields = (read_text(f"{root.rstrip('/')}/proc/loadavg") or "").split()
    try:
        return float(fields[1])
    except (IndexError, ValueError):
        return None
