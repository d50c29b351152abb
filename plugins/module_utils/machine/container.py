"""Whether this is a container, by the traces of its runtime, and what it lacks."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass

from ..common.files import read_text
from .mounts import Mount, mount_at, read_mounts

_CGROUP_WORDS = (
    ("kubepods", "kubernetes"),
    ("libpod", "podman"),
    ("docker", "docker"),
    ("containerd", "containerd"),
    ("lxc", "lxc"),
)


@dataclass(frozen=True)
class Container:
    """``runtime``: docker, podman, kubernetes ... or ``unknown``; ``evidence`` is where that was read."""

    runtime: str
    evidence: str


def read_container(root: str = "/") -> Container | None:
    """None on a machine, even on one that was made from a container image and still has its traces."""
    mounts = read_mounts(root)
    if any("/secrets/kubernetes.io/" in mount.mount_point + "/" for mount in mounts):
        return Container("kubernetes", "its secrets are mounted")
    top = mount_at("/", mounts)
    runtime = read_text(os.path.join(root, "run/systemd/container"))
    # Written at boot, if /run is a separate file system; on a disk it may come from an image.
    if runtime and not (_owns_its_root(top) and mount_at("/run", mounts) is None):
        return Container(runtime, "/run/systemd/container")
    if _owns_its_root(top):
        return None
    marks = _by_marks(root)
    if marks is None and top is not None and top.fs_type in ("overlay", "fuse.fuse-overlayfs", "aufs"):
        return Container("unknown", "/ is %s" % top.fs_type)
    return marks


def _by_marks(root: str) -> Container | None:
    cgroup = read_text(os.path.join(root, "proc/1/cgroup")) or ""
    for word, runtime in _CGROUP_WORDS:
        if word in cgroup:
            return Container(runtime, "/proc/1/cgroup")
    for mark, runtime in (("run/.containerenv", "podman"), (".dockerenv", "docker")):
        if os.path.exists(os.path.join(root, mark)):
            return Container(runtime, "/" + mark)
    return None


def _owns_its_root(top: Mount | None) -> bool:
    # A whole file system of a block device at / is a machine's: containers get a layer, or a directory of one.
    return top is not None and top.root == "/" and not top.device_number.startswith("0:")


def device_nodes(pattern: str, root: str = "/") -> list[str]:
    """Paths under /dev that match, as seen inside ``root``."""
    prefix = root.rstrip("/")
    return sorted(path[len(prefix) :] for path in glob.glob(prefix + "/dev/" + pattern))
