"""What this container was not given, and how to give it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunetool.inspect.model import Finding, Inspection
from tunetool.node.units import format_size_binary

DOCKER_SHM = 64 * 2**20
"""What Docker and Kubernetes mount at /dev/shm unless told otherwise (docker run, --shm-size)."""


def container_findings(
    shown: Inspection,
    nodes: Mapping[str, Sequence[str]],
    sys: bool,
    udev: bool,
    nvidia_fs: bool,
    point: str | None,
) -> list[Finding]:
    """Nothing outside a container. ``nodes``: what is in /dev; ``point``: where the host mounts its volume."""
    if shown.host.container is None:
        return []
    found = []
    memory = shown.memory
    if not sys:
        found.append(
            _finding("sys", "no /sys: nothing can be said of drives and GPUs", "-v /sys:/sys:ro", "hostPath /sys")
        )
    if memory.memlock not in (None, "unlimited"):
        limit = format_size_binary(int(memory.memlock)) if memory.memlock.isdigit() else memory.memlock
        found.append(
            _finding(
                "memlock",
                f"may lock {limit} of memory: DeepSpeed's pinned buffers fail beyond it",
                "--ulimit memlock=-1",
                "`LimitMEMLOCK=infinity` for the node's container runtime, or the capability IPC_LOCK",
            )
        )
    if memory.shm is None or memory.shm <= DOCKER_SHM:
        size = format_size_binary(memory.shm) if memory.shm is not None else "absent"
        found.append(
            _finding(
                "shm",
                f"/dev/shm is {size}: DataLoader workers and NCCL fail with bus errors",
                f"--shm-size={_half(shown)}",
                "an emptyDir with `medium: Memory` and a sizeLimit, mounted at /dev/shm",
            )
        )
    if shown.arrays and not any(one.device in {f"/dev/{a.device}" for a in shown.arrays} for one in shown.filesystems):
        place = point or "/mnt/nvme_raid0"
        found.append(
            _finding("volume", "the scratch volume is not mounted here", f"-v {place}:{place}", f"hostPath {place}")
        )
    if shown.drives and not nodes.get("nvme*"):
        found.append(
            _finding(
                "drives",
                f"{len(shown.drives)} drives and no /dev/nvme*: their health cannot be asked",
                "--device=/dev/nvme0 ... --cap-add SYS_ADMIN",
                "a privileged pod; only for looking, jobs need none of it",
            )
        )
    if shown.gpus and not nodes.get("nvidia[0-9]*"):
        found.append(
            _finding("gpus", f"{len(shown.gpus)} GPUs and no /dev/nvidia*", "--gpus all", "`nvidia.com/gpu` in limits")
        )
    if not udev and (shown.gpus or shown.drives):
        found.append(
            _finding(
                "udev",
                "no udev database: cuFile registers no file, not even for its compatible mode",
                "-v /run/udev:/run/udev:ro",
                "hostPath /run/udev, readOnly",
            )
        )
    if nvidia_fs and not nodes.get("nvidia-fs*"):
        found.append(
            _finding(
                "nvidia-fs",
                "the host has nvidia-fs loaded, and no /dev/nvidia-fs* is here",
                "-e NVIDIA_GDS=enabled",
                "the GPU operator's `gds.enabled`; without NVIDIA's toolkit give each /dev/nvidia-fs* as a device",
            )
        )
    return found


def _half(shown: Inspection) -> str:
    sizes = [size for size in (shown.memory.total, shown.memory.cgroup_limit) if size]
    return f"{max(1, min(sizes) // 2**31)}g" if sizes else "64g"


def _finding(name: str, found: str, docker: str, kubernetes: str) -> Finding:
    return Finding(
        id=f"container.{name}", found=found, remedy=f"docker: `docker run {docker}`; Kubernetes: {kubernetes}"
    )
