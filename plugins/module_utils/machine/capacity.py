"""The capacity of a node for benchmarks: directory to write to, free space, memory, GPUs, training environment."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from typing import Any, Mapping

from ..common.commands import CommandError, run
from ..common.files import whole_number
from ..common.manifest import MANIFEST_PATH, ManifestError, each_volume, load
from ..common.training_part import REPAIR, training_of
from .container import device_nodes
from .memory import memory_left
from .mounts import mount_at, read_mounts

_MIB = 2**20
_SMI = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_SMI_SECONDS = 60.0


@dataclass(frozen=True)
class Capacity:
    """Sizes are bytes that this user can still use."""

    target: str = ""
    """A directory on the storage to measure; empty if there is none: ``problem`` has the reason."""
    problem: str = ""
    free_bytes: int = 0
    memory_bytes: int = 0
    shared_bytes: int = 0
    """Free bytes of the directory in memory."""
    cpus: int = 1
    gpus: int = 0
    gpu_bytes: int = 0
    """Memory of the smallest GPU; 0 if unknown."""
    python: str = ""
    """Interpreter of the training environment; empty if the node has none that can be used."""
    python_problem: str = ""
    """Why the interpreter that the manifest names cannot be used."""
    accelerator: str = ""
    """The accelerator that its torch was built for; empty if the node has none."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as a module's result."""
        return asdict(self)


def capacity_of(answer: Mapping[str, Any]) -> Capacity:
    """Read the result of ``to_dict``. Raises ``TypeError`` for anything else."""
    capacity, like = Capacity(**answer), Capacity()
    for field in fields(Capacity):
        value = getattr(capacity, field.name)
        if type(value) is not type(getattr(like, field.name)) or (isinstance(value, int) and not 0 <= value < 2**64):
            raise TypeError("`%s` of a node's capacity is %.40r" % (field.name, value))
    return capacity


def read_capacity(target: str = "", memory: str = "/dev/shm", manifest: str = MANIFEST_PATH) -> Capacity:
    """The capacity of this machine. ``target``: directory for the benchmarks; empty for the manifest's volume."""
    document, problem = _manifest(manifest)
    training = training_of(document)
    if target:
        problem = ""
    else:
        target, problem = _target(document, problem)
    left = memory_left()
    fault = training.fault() if training is not None else None
    return Capacity(
        target=target,
        problem=problem,
        free_bytes=_free(target) if target else 0,
        memory_bytes=left[0] if left is not None else 0,
        shared_bytes=_free(memory),
        cpus=os.cpu_count() or 1,
        gpus=len(device_nodes("nvidia[0-9]*")),
        gpu_bytes=_gpu_bytes(),
        python=training.python if training is not None and fault is None else "",
        python_problem="%s; %s" % (fault, REPAIR) if fault is not None else "",
        accelerator=training.accelerator if training is not None else "",
    )


def _manifest(path: str) -> tuple[dict[str, Any] | None, str]:
    try:
        return load(path), ""
    except FileNotFoundError:
        return None, "there is no manifest `%s`: run `tunetool provision` for the node, or give `--target DIR`" % path
    except ManifestError as error:
        return None, "%s; %s" % (error, error.hint)


def _target(manifest: Mapping[str, Any] | None, problem: str) -> tuple[str, str]:
    """The first directory on the volume that this user may write to, or why there is none."""
    if manifest is None:
        return "", problem
    # Of several volumes the first: what is measured there is one volume's, and the path says which.
    _, volume = each_volume(manifest)[0]
    mount_point = volume["filesystem"]["mount_point"]
    if mount_at(mount_point, read_mounts()) is None:
        return "", "`%s` is not mounted: see `tunetool verify` there" % mount_point
    wanted = [path for path in (mount_point, volume.get("offload_dir")) if path]
    for path in wanted:
        if os.access(path, os.W_OK | os.X_OK):
            return str(path), ""
    named = " nor to ".join("`%s`" % path for path in wanted)
    return "", "this user may not write to %s: give `--target DIR`, or log in as another" % named


def _free(path: str) -> int:
    """Free bytes of the file system of ``path``, which need not exist."""
    while not os.path.isdir(path):
        path = os.path.dirname(path) or "/"
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize


def _gpu_bytes() -> int:
    if not device_nodes("nvidia[0-9]*"):
        return 0
    try:
        return smallest_gpu(run(_SMI, timeout=_SMI_SECONDS).stdout)
    except CommandError:
        return 0


def smallest_gpu(text: str) -> int:
    """Bytes of the smallest GPU's memory; ``text`` has a line of MiB for each. 0 if no line is a number."""
    sizes = [size for size in map(whole_number, text.split()) if size is not None and size >= 0]
    return min(sizes, default=0) * _MIB
