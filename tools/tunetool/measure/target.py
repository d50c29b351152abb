"""The directory that is measured."""

from __future__ import annotations

import os
from pathlib import Path

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.node.array.md_arrays import read_arrays
from tunetool.node.machine.block_stack import devices_under, read_stack
from tunetool.node.machine.mounts import Mount, mount_holding, read_mounts

_MOST_LINKS = 40
"""As many as the kernel follows (path_resolution(7))."""


def check_target(target: Path, root: str = "/") -> None:
    """A directory that can be written. Raises ``UsageProblem``, and ``CannotJudge`` for one that answers no I/O."""
    refuse_unanswering(target, root)
    check_directory(target)


def check_directory(target: Path) -> None:
    """As ``check_target``, for a directory that answers I/O."""
    if not target.exists():
        raise UsageProblem(f"`{target}` does not exist", "`--target` takes a directory on the storage to measure")
    if not target.is_dir():
        raise UsageProblem(f"`{target}` is not a directory", "`--target` takes a directory on the storage to measure")
    if not os.access(target, os.W_OK | os.X_OK):
        raise UsageProblem(
            f"`{target}` is not writable", "run as a user who may write there, or choose another `--target`"
        )


def refuse_unanswering(target: Path, root: str = "/") -> None:
    """Raises ``CannotJudge`` where ``target`` lies on an array that is stopped, broken or suspended.

    That is known from /proc and /sys. Nothing on the array is touched, since any I/O may wait in a state in which no
    signal ends it; links are followed one by one, for the same reason.
    """
    faults = {array.device: array.fault for array in read_arrays(root) if array.fault}
    if not faults:
        return
    mounts = read_mounts(root)
    path, links = target.absolute(), 0
    while True:
        for prefix in (*reversed(path.parents), path):
            mount = mount_holding(str(prefix), mounts)
            fault = next((faults[name] for name in _devices(mount, root) if name in faults), None)
            if fault:
                what, _, cure = fault.partition(": ")
                raise CannotJudge(f"`{target}` was not touched: {what}", cure)
            if prefix.is_symlink() and links < _MOST_LINKS:
                links += 1
                path = prefix.parent / prefix.readlink() / path.relative_to(prefix)
                break
        else:
            return


def _devices(mount: Mount | None, root: str) -> list[str]:
    device = read_stack(mount.mount_point, root).device if mount else None
    return devices_under(device, root) if device else []
