"""Makes the XFS on the array, and recognises one that mkfs did not finish."""

from __future__ import annotations

from ..array.md_arrays import Array
from ..common.commands import run
from .xfs_geometry import Geometry, mkfs_arguments


def make_xfs(array: Array, geometry: Geometry, label: str, uuid: str | None = None) -> None:
    """Make XFS on an array that holds nothing; mkfs itself refuses any other. ``uuid``: a given UUID."""
    known = ["-m", "uuid=" + uuid] if uuid else []
    run(["mkfs.xfs", *mkfs_arguments(geometry, label), *known, array.path], timeout=1800)
    run(["udevadm", "settle", "--timeout=60"], accept=(0, 1))


_XFS_MAGIC, _XFS_LABEL, _XFS_IN_PROGRESS = slice(0, 4), slice(108, 120), 126
"""Offsets in the superblock (xfs_format.h, struct xfs_dsb)."""


def half_made(path: str, label: str) -> bool:
    """Whether a device holds an XFS of this label that mkfs did not finish, as when the power failed.

    mkfs.xfs writes the superblock with a mark first and takes the mark away last. The kernel mounts no file system
    with that mark, so it never held a file. libblkid and xfs_info show it like any other.
    """
    with open(path, "rb") as device:
        block = device.read(512)
    return (
        len(block) == 512
        and block[_XFS_MAGIC] == b"XFSB"
        and block[_XFS_LABEL].rstrip(b"\0") == label.encode()
        and block[_XFS_IN_PROGRESS] == 1
    )


def discard_half_made(array: Array) -> None:
    """Remove what ``half_made`` found. wipefs itself refuses a device in use."""
    run(["wipefs", "--all", "--quiet", array.path])
