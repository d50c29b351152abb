"""How drives become a place for files: the layouts, their file systems and how they are made. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tunetool.node.common.raid_levels import RAID0, RAID1, RAID10, Level
from tunetool.node.machine.file_system import BUILT

FileSystem = Literal["xfs", "ext4"]
CHUNK = 2**20
"""As ``site.yml`` makes an array (``raid_array_chunk``)."""
_EXT4_BLOCK = 4096
_LABEL = "tunetool"
RAW, ARRAY, FILES = "drives-raw", "array-raw", "array-files"
"""Of a standing volume: its member drives, its device, and files on it."""


@dataclass(frozen=True)
class Layout:
    """A way to put file systems on drives."""

    file_system: FileSystem
    level: Level | None = None
    """Of the md array that has the one file system; None: a file system on each drive."""

    def array(self, drives: int) -> Level | None:
        """The level of the array over so many drives; None where there is none: one drive makes no array."""
        return self.level if drives > 1 else None

    def lacks(self, drives: int) -> str | None:
        """Why it cannot be made of so many drives, or None."""
        return self.level.lacks(drives) if self.level else None

    def copies(self, drives: int) -> int:
        """On how many of the drives each byte lies."""
        level = self.array(drives)
        return drives // level.data_members(drives) if level else 1

    def medium(self, drives: int, kind: str) -> str:
        """For people and records; ``kind``: of the drives."""
        if level := self.array(drives):
            return f"md {level} ({drives} x {kind}), {self.file_system}"
        return f"{drives} x {kind}, {self.file_system} on each" if drives > 1 else f"{kind}, {self.file_system}"


LAYOUTS: Mapping[str, Layout] = {
    "raid0-xfs": Layout("xfs", RAID0),
    "raid0-ext4": Layout("ext4", RAID0),
    "raid10-xfs": Layout("xfs", RAID10),
    "raid1-xfs": Layout("xfs", RAID1),
    "xfs-per-drive": Layout("xfs"),
    "ext4-per-drive": Layout("ext4"),
}
DEFAULT = ("raid0-xfs", "raid0-ext4", "xfs-per-drive")
COMPARED: Mapping[str, Sequence[tuple[str, str]]] = {
    "xfs_over_ext4": (("raid0-xfs", "raid0-ext4"), ("xfs-per-drive", "ext4-per-drive")),
    "raid0_over_per_drive": (("raid0-xfs", "xfs-per-drive"), ("raid0-ext4", "ext4-per-drive")),
    "raid10_over_raid0": (("raid10-xfs", "raid0-xfs"),),
    "raid1_over_raid0": (("raid1-xfs", "raid0-xfs"),),
}
"""By the figure's name, the layouts whose bandwidths are divided."""
_ALONE = ("raid0-xfs", "xfs-per-drive")
ALONE: Mapping[str, Sequence[str]] = {"raid10-xfs": _ALONE, "raid1-xfs": _ALONE}
"""By a layout that one drive cannot have, those that are its file system alone there."""
MOUNT_OPTIONS: Mapping[FileSystem, str] = {
    # As `site.yml` mounts it (scratch_filesystem_mount_options).
    "xfs": "noatime,logbufs=8,logbsize=256k",
    # Otherwise the kernel writes inode tables behind the first minutes of a new ext4 (ext4(5)).
    "ext4": "noatime,noinit_itable",
}
LEAST_BYTES: Mapping[FileSystem, int] = {"xfs": 320 * 2**20, "ext4": 16 * 2**20}
"""Of a drive. mkfs.xfs refuses less than 300 MB."""


def mkfs(layout: Layout, device: str, uuid: str, drives: int) -> list[str]:
    """The call that makes its file system on a device with nothing on it: one drive, or the layout's array over
    ``drives``, to whose stripes it is aligned as ``site.yml`` does it.

    Nothing is discarded first: that would change the state of the flash from one layout to the next.
    """
    level = layout.array(drives)
    data = level.data_members(drives) if level else 1
    if layout.file_system == "xfs":
        shape = BUILT.shape(BUILT.geometry(level.chunk(CHUNK), data), _LABEL) if level else ["-L", _LABEL]
        return [BUILT.program, "-q", "-K", *shape, "-m", f"uuid={uuid}", device]
    stride = CHUNK // _EXT4_BLOCK
    extended = f"nodiscard,stride={stride},stripe_width={stride * data}" if level else "nodiscard"
    return ["mkfs.ext4", "-q", "-b", str(_EXT4_BLOCK), "-E", extended, "-L", _LABEL, "-U", uuid, device]


def programs(layout: Layout, drives: int) -> list[str]:
    """What making it needs."""
    return [f"mkfs.{layout.file_system}", "wipefs", *(["mdadm"] if layout.array(drives) else [])]


def counts(drives: int) -> list[int]:
    """1, 2, 4, 8 ... and all."""
    powers = [1 << power for power in range(drives.bit_length()) if 1 << power < drives]
    return [*powers, drives]
