"""How drives become a place for files: the layouts, their file systems and how they are made. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tunetool.node.common.raid_levels import RAID0
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
    striped: bool
    """One file system on a RAID0; else one on each drive."""

    def medium(self, drives: int, kind: str) -> str:
        """For people and records; ``kind``: of the drives."""
        # One drive makes no array.
        if self.striped and drives > 1:
            return f"md {RAID0} ({drives} x {kind}), {self.file_system}"
        return f"{drives} x {kind}, {self.file_system} on each" if drives > 1 else f"{kind}, {self.file_system}"


LAYOUTS: Mapping[str, Layout] = {
    "raid0-xfs": Layout("xfs", striped=True),
    "raid0-ext4": Layout("ext4", striped=True),
    "xfs-per-drive": Layout("xfs", striped=False),
    "ext4-per-drive": Layout("ext4", striped=False),
}
DEFAULT = ("raid0-xfs", "raid0-ext4", "xfs-per-drive")
COMPARED: Mapping[str, Sequence[tuple[str, str]]] = {
    "xfs_over_ext4": (("raid0-xfs", "raid0-ext4"), ("xfs-per-drive", "ext4-per-drive")),
    "raid0_over_per_drive": (("raid0-xfs", "xfs-per-drive"), ("raid0-ext4", "ext4-per-drive")),
}
"""By the figure's name, the layouts whose bandwidths are divided."""
MOUNT_OPTIONS: Mapping[FileSystem, str] = {
    # As `site.yml` mounts it (scratch_filesystem_mount_options).
    "xfs": "noatime,logbufs=8,logbsize=256k",
    # Otherwise the kernel writes inode tables behind the first minutes of a new ext4 (ext4(5)).
    "ext4": "noatime,noinit_itable",
}
LEAST_BYTES: Mapping[FileSystem, int] = {"xfs": 320 * 2**20, "ext4": 16 * 2**20}
"""Of a drive. mkfs.xfs refuses less than 300 MB."""


def mkfs(file_system: FileSystem, device: str, uuid: str, members: int) -> list[str]:
    """The call that makes it on a device with nothing on it; over an array of ``members`` aligned to its stripes.

    Nothing is discarded first: that would change the state of the flash from one layout to the next.
    """
    if file_system == "xfs":
        shape = BUILT.shape(BUILT.geometry(CHUNK, members), _LABEL) if members > 1 else ["-L", _LABEL]
        return [BUILT.program, "-q", "-K", *shape, "-m", f"uuid={uuid}", device]
    stride = CHUNK // _EXT4_BLOCK
    extended = f"nodiscard,stride={stride},stripe_width={stride * members}" if members > 1 else "nodiscard"
    return ["mkfs.ext4", "-q", "-b", str(_EXT4_BLOCK), "-E", extended, "-L", _LABEL, "-U", uuid, device]


def programs(layout: Layout, drives: int) -> list[str]:
    """What making it needs."""
    return [f"mkfs.{layout.file_system}", "wipefs", *(["mdadm"] if layout.striped and drives > 1 else [])]


def counts(drives: int) -> list[int]:
    """1, 2, 4, 8 ... and all."""
    powers = [1 << power for power in range(drives.bit_length()) if 1 << power < drives]
    return [*powers, drives]
