"""Findings about a container: what it lacks, and the Docker and Kubernetes settings that provide it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunetool.inspect.model import Finding, Inspection
from tunetool.node.units import format_size_binary

DOCKER_SHM = 64 * 2**20
"""Size of /dev/shm that Docker and Kubernetes mount by default, in bytes (docker run, --shm-size)."""


def container_findings(
    shown: Inspection,
    nodes: Mapping[str, Sequence[str]],
    sys: bool,
    udev: bool,
    nvidia_fs: bool,
    point: str | None,
) -> list[Finding]:
    """What the container lacks; empty outside a container.

    ``nodes``: device nodes by their pattern under /dev; ``sys`` and ``udev``: /sys and udev's database are there;
    ``point``: the mount point of the host's scratch volume.
    """
    if shown.host.container is None:
        return []
    missing = []
    memory = shown.memory
    if not sys:
        missing.append(
            _finding("sys", "no /sys: drives and GPUs cannot be inspected", "-v /sys:/sys:ro", "hostPath /sys")
        )
    if memory.memlock not in (None, "unlimited"):
        missing.append(
            _finding(
                "memlock",
                f"a process may lock {memory.memlock_in_words} of memory: larger pinned buffers of DeepSpeed fail",
                "--ulimit memlock=-1",
                "`LimitMEMLOCK=infinity` for the node's container runtime, or the capability IPC_LOCK",
            )
        )
    if memory.shm is None or memory.shm <= DOCKER_SHM:
        size = format_size_binary(memory.shm) if memory.shm is not None else "absent"
        missing.append(
            _finding(
                "shm",
                f"/dev/shm is {size}: DataLoader workers and NCCL fail with bus errors",
                f"--shm-size={_half_of_memory(shown)}",
                "an emptyDir with `medium: Memory` and a sizeLimit, mounted at /dev/shm",
            )
        )
    if memory.shm_huge == "never":
        missing.append(
            _finding(
                "shm_huge",
                "/dev/shm has pages of 4 KiB; a container's is a mount without the node's `huge=`",
                "--ipc=host` or `-v /dev/shm:/dev/shm",
                "hostPath /dev/shm, the node's, in place of the emptyDir, which has no such option",
            )
        )
    if shown.arrays and not any(
        filesystem.device in {f"/dev/{a.device}" for a in shown.arrays} for filesystem in shown.filesystems
    ):
        volume_path = point or "/mnt/nvme_raid0"
        missing.append(
            _finding(
                "volume",
                "the scratch volume is not mounted in this container",
                f"-v {volume_path}:{volume_path}",
                f"hostPath {volume_path}",
            )
        )
    if shown.drives and not nodes.get("nvme*"):
        missing.append(
            _finding(
                "drives",
                f"{len(shown.drives)} drives and no /dev/nvme*: their health logs cannot be read",
                "--device=/dev/nvme0 ... --cap-add SYS_ADMIN",
                "a privileged pod; only inspection needs it, jobs do not",
            )
        )
    if shown.gpus and not nodes.get("nvidia[0-9]*"):
        missing.append(
            _finding("gpus", f"{len(shown.gpus)} GPUs and no /dev/nvidia*", "--gpus all", "`nvidia.com/gpu` in limits")
        )
    if not udev and (shown.gpus or shown.drives):
        missing.append(
            _finding(
                "udev",
                "no udev database: cuFile registers no file, not even in compat mode",
                "-v /run/udev:/run/udev:ro",
                "hostPath /run/udev, readOnly",
            )
        )
    if nvidia_fs and not nodes.get("nvidia-fs*"):
        missing.append(
            _finding(
                "nvidia-fs",
                "the host has loaded nvidia-fs, but this container has no /dev/nvidia-fs*",
                "-e NVIDIA_GDS=enabled",
                "the GPU operator's `gds.enabled`; without NVIDIA's toolkit pass each /dev/nvidia-fs* as a device",
            )
        )
    return missing


def _half_of_memory(shown: Inspection) -> str:
    sizes = [size for size in (shown.memory.total, shown.memory.cgroup_limit) if size]
    return f"{max(1, min(sizes) // 2**31)}g" if sizes else "64g"


def _finding(name: str, found: str, docker: str, kubernetes: str) -> Finding:
    return Finding(
        id=f"container.{name}", found=found, remedy=f"docker: `docker run {docker}`; Kubernetes: {kubernetes}"
    )
