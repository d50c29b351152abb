"""Other work on a node: programs on its GPUs, jobs of its scheduler, users of its volume."""

from __future__ import annotations

import glob
import os
import re
from typing import Mapping

from ..common.commands import CommandError, run
from ..common.documents import read_bytes
from ..common.files import read_text, whole_number
from .mounts import plain_path, read_mounts, volumes_at
from .volume_users import occupants

_SLURM_STEP = re.compile(rb"slurmstepd: \[(\d{1,19})[.\]]")
_LONGEST = 16 << 20
"""Bytes of a command line that are read."""
_GPU = re.compile(r"^/dev/nvidia\d+$")
_DAEMONS = (
    "nvidia-persiste",
    "nv-hostengine",
    "nv-fabricmanage",
    "dcgm-exporter",
    "nvsm",
    "nvidia-smi",
    "nvidia-power",
)
"""Names, cut to 15 characters by the kernel, of services that hold GPUs open on an idle node."""


def gpu_processes(root: str = "/") -> list[str]:
    """Processes that compute on a GPU of this node; if nvidia-smi does not answer, those that have one open."""
    query = ["nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader"]
    try:
        shown = run(query, timeout=20).stdout
    except CommandError:
        return gpu_holders(root)
    lines = [line.split(",", 1) for line in shown.splitlines() if re.match(r"\s*\d+\s*,", line)]
    return ["process %s (`%s`) uses a GPU" % (pid.strip(), name.strip()) for pid, name in lines]


def gpu_holders(root: str = "/") -> list[str]:
    """Processes that have a GPU open, from /proc; works also if nvidia-smi and the loaded driver do not match."""
    holders = {}
    for path in glob.glob(os.path.join(root, "proc/[0-9]*/fd/*")):
        try:
            target = os.readlink(path)
        except OSError:  # The process has ended.
            continue
        pid = whole_number(path.split(os.sep)[-3])
        if pid is not None and _GPU.match(target):
            holders[pid] = read_text(os.path.join(root, "proc/%d/comm" % pid)) or "?"
    return [
        "process %d (`%s`) has a GPU open" % (pid, name)
        for pid, name in sorted(holders.items())
        if not name.startswith(_DAEMONS)
    ]


def scheduler_jobs(environment: Mapping[str, str], root: str = "/") -> list[str]:
    """Slurm jobs on this node, except the one of this process: a job that computes now may write soon.

    Slurm's own step daemon names them, in the title of its process: `slurmstepd: [4711.batch]`.
    """
    jobs = set()
    for path in glob.glob(os.path.join(root, "proc/[0-9]*/cmdline")):
        try:
            match = _SLURM_STEP.match(read_bytes(path, _LONGEST))
        except OSError:  # The process has ended.
            continue
        if match and match[1].decode() != environment.get("SLURM_JOB_ID"):
            jobs.add(int(match[1]))
    return ["Slurm job %d runs on this node" % job for job in sorted(jobs)]


def volume_users(mount_point: str, root: str = "/") -> list[str]:
    """Users of what is mounted at ``mount_point``, also where another mount hides it; empty if nothing is."""
    point = plain_path(mount_point)
    # An automount's trigger is no volume, and systemd always has it open.
    mounts = [each for each in read_mounts(root) if each.fs_type != "autofs"]
    users: list[str] = []
    for number in dict.fromkeys(each.device_number for each in mounts if plain_path(each.mount_point) == point):
        device = os.path.basename(os.path.realpath(os.path.join(root, "sys/dev/block", number)))
        users += ["`%s`: %s" % (mount_point, line) for line in occupants(number, device, mount_point, root)]
    return list(dict.fromkeys(users))


def killed_by_a_reboot(mount_point: str, environment: Mapping[str, str], root: str = "/") -> list[str]:
    """Work that a reboot would end, a line each: on what is mounted there, or in directories of it."""
    work = scheduler_jobs(environment, root) + (gpu_processes() if root == "/" else [])
    seen = " ".join(work)
    # Name a process once, even if nvidia-smi names it too.
    work += [line for line in gpu_holders(root) if " ".join(line.split()[:2]) + " " not in seen + " "]
    places = (volumes_at(mount_point, read_mounts(root)) or [mount_point]) if mount_point else []
    return work + [user for place in places for user in volume_users(place, root)]
