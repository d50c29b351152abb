"""The extents of a file on its device, from its file system (FIEMAP).

Layout and flags: Linux, Documentation/filesystems/fiemap.rst and include/uapi/linux/fiemap.h.
"""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass

FILE_SYSTEMS = ("xfs", "ext4")
"""File systems whose physical addresses are bytes of the mounted device. btrfs returns its own addresses."""

_FS_IOC_FIEMAP = 0xC020660B
_HEAD = struct.Struct("=QQIIII")
_EXTENT = struct.Struct("=QQQ2QI3I")
_AT_ONCE = 256
_SYNC = 0x1
_LAST = 0x1

_UNUSABLE = (
    (0x2, "lies nowhere yet"),
    (0x4, "is not on the device yet"),
    (0x8, "is encoded"),
    (0x80, "is encrypted"),
    (0x100, "is not aligned to blocks"),
    (0x200, "lies in its inode"),
    (0x400, "shares its block with another"),
    (0x800, "is allocated and was never written"),
    (0x2000, "is shared with another file"),
)
"""Flags of an extent whose address is not that of its bytes alone."""


class NoExtents(Exception):
    """The extents are unknown, or the file cannot be read from the device."""


@dataclass(frozen=True)
class Extent:
    """A run of a file that is contiguous on the device. All in bytes."""

    logical: int
    physical: int
    length: int


def read_extents(path: str) -> list[Extent]:
    """The extents of a file, after a sync, in order and without holes. Raises ``NoExtents``."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise NoExtents(f"`{path}`: {error.strerror}") from None
    try:
        os.fsync(handle)
        size = os.fstat(handle).st_size
        return whole(_ask(handle, size), size)
    except OSError as error:
        raise NoExtents(f"its file system does not say where a file lies: {error.strerror}") from None
    finally:
        os.close(handle)


def _ask(handle: int, size: int) -> list[tuple[Extent, int]]:
    extents: list[tuple[Extent, int]] = []
    start = 0
    while start < size:
        answer = bytearray(_HEAD.pack(start, size - start, _SYNC, 0, _AT_ONCE, 0) + bytes(_EXTENT.size * _AT_ONCE))
        fcntl.ioctl(handle, _FS_IOC_FIEMAP, answer)
        count = _HEAD.unpack_from(answer)[3]
        if not count:
            break
        for index in range(count):
            logical, physical, length, _, _, flags, *_ = _EXTENT.unpack_from(answer, _HEAD.size + index * _EXTENT.size)
            extents.append((Extent(logical, physical, length), flags))
        last, flags = extents[-1]
        start = last.logical + last.length
        if flags & _LAST:
            break
    return extents


def whole(flagged: list[tuple[Extent, int]], size: int) -> list[Extent]:
    """Extents with their flags to a file of ``size`` bytes, clipped at its end. Raises ``NoExtents``."""
    extents, reached = [], 0
    for extent, flags in flagged:
        if extent.logical >= size:
            break
        for bit, words in _UNUSABLE:
            if flags & bit:
                raise NoExtents(f"a part of it {words}")
        if extent.logical != reached:
            raise NoExtents(f"it has a hole at byte {reached}")
        extents.append(Extent(extent.logical, extent.physical, min(extent.length, size - extent.logical)))
        reached = extent.logical + extent.length
    if reached < size:
        raise NoExtents(f"it has a hole at byte {reached}")
    return extents
