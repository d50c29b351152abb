"""Checks the free space before a copy: on the file system of its destination, and in memory for a tmpfs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.node.machine.memory import memory_left
from tunetool.node.machine.mounts import mount_holding, read_mounts
from tunetool.node.units import format_size
from tunetool.stage.tree import Entry

IN_MEMORY = ("tmpfs", "ramfs")
_PAGE = 4096


@dataclass(frozen=True)
class Limit:
    """``left``: bytes that can still be written; ``what``: the beginning of a message that names the limit."""

    left: int
    what: str


def space_needed(entries: Iterable[Entry]) -> int:
    """Bytes that a copy needs: whole pages for each file, one page for each other entry."""
    return sum(max(_PAGE, -(-entry.size // _PAGE) * _PAGE) for entry in entries)


def limits(directory: Path, fs_type: str, root: str = "/") -> list[Limit]:
    """The limits for a copy to ``directory``, the tightest first."""
    status = os.statvfs(directory)
    bounds = [Limit(status.f_bavail * status.f_frsize, f"`{directory}` has")] if fs_type != "ramfs" else []
    if fs_type in IN_MEMORY:
        memory = memory_left(root)
        if memory is not None:
            free, bound_by = memory
            bounds.append(
                Limit(
                    free, "the machine's RAM has" if bound_by == "RAM" else f"the memory limit of `{bound_by}` leaves"
                )
            )
    return sorted(bounds, key=lambda limit: limit.left)


def refuse_too_big(need: int, inodes: int, directory: Path, bounds: list[Limit], old: int) -> None:
    """Raises ``CannotJudge`` if the copy does not fit. ``old``: bytes of the old tree, which is removed after the copy.

    ``inodes``: number of files, directories and links to create.
    """
    if bounds and need > bounds[0].left:
        other_limits = "".join(f"; {bound.what} {format_size(bound.left)}" for bound in bounds[1:])
        hint = "stage less, free some, or choose another DST"
        if old and need - old <= bounds[0].left:
            hint = (
                f"the old tree holds {format_size(old)} until the new one is complete: `tunetool stage evict` it first"
            )
        raise CannotJudge(
            f"{format_size(need)} are needed, {bounds[0].what} {format_size(bounds[0].left)}{other_limits}", hint
        )
    status = os.statvfs(directory)
    # File systems without a fixed number of inodes say 0.
    if status.f_files and inodes > status.f_favail:
        raise CannotJudge(
            f"the copy has {inodes} files and directories, `{directory}` has {status.f_favail} inodes left",
            "choose another DST, or mount it with more (`nr_inodes=` of a tmpfs)",
        )


def need_room(directory: Path, count: int, purpose: str) -> None:
    """Raises ``CannotJudge`` if ``count`` bytes do not fit below ``directory`` or, for a tmpfs, into memory."""
    mount = mount_holding(str(directory), read_mounts())
    bounds = limits(directory, mount.fs_type if mount else "unknown")
    if bounds and count > bounds[0].left:
        other_limits = "".join(f"; {bound.what} {format_size(bound.left)}" for bound in bounds[1:])
        raise CannotJudge(
            f"{purpose} takes {format_size(count)}, {bounds[0].what} {format_size(bounds[0].left)}{other_limits}",
            "free some, choose a smaller model or fewer images, or another `--target`",
        )
