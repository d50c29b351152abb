"""Contents that libblkid does not see: file systems whose first superblock is gone, and data without any label.

It reads a few KiB of a drive. What it finds is there; a drive on which it finds nothing may still hold data elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import struct
import uuid
from dataclasses import dataclass
from typing import Callable, Iterable, Iterator

BTRFS, XFS, DATA = "btrfs without its first superblock", "xfs without its first superblock", "data without a label"
PROBE = 4096
_MIB, _GIB, _TIB = 2**20, 2**30, 2**40

_BTRFS_COPIES = (64 * _MIB, 256 * _GIB)
"""Offsets of the second and third superblock (btrfs(5); kernel: fs/btrfs/disk-io.h, btrfs_sb_offset)."""
_BTRFS_MAGIC = b"_BHRfS_M"
_XFS_MAGIC = b"XFSB"
_XFS_BLOCK = 4096
"""The default of mkfs.xfs, and the largest block of most kernels."""
_XFS_MANY = 512
"""Allocation groups on any drive in practice: mkfs.xfs makes 4 to 32 of them, or one for each processor."""
_XFS_STRIPED = 64
_STRIPES = (16, 32, 64, 128, 256)
_EVENLY = 32
_UNWRITTEN = (0x00, 0xFF)
"""A drive that was never written, or whose blocks were discarded, returns blocks of one of these bytes."""


@dataclass(frozen=True)
class Piece:
    """Contents at an offset of a device."""

    kind: str
    offset: int
    uuid: str | None = None


Reader = Callable[[int, int], bytes]


def look(path: str, deep: bool) -> Piece | None:
    """The first contents of the device without a label that are found; ``deep``: also data of no known kind.

    Raises ``OSError``.
    """
    with _open(path, os.O_RDONLY) as (handle, size):

        def read(offset: int, length: int) -> bytes:
            return os.pread(handle, length, offset)

        return next(_superblocks(read, size), None) or (next(_data(read, size), None) if deep else None)


def clear(path: str) -> None:
    """Overwrite with zeros what ``look`` finds, so that the drive counts as blank. Raises ``OSError``.

    It leaves the first and the last MiB of the drive alone, by which a plan knows the drive again: after an
    interruption the same plan goes on.
    """
    with _open(path, os.O_RDWR) as (handle, size):

        def read(offset: int, length: int) -> bytes:
            return os.pread(handle, length, offset)

        for piece in [*_superblocks(read, size), *_data(read, size)]:
            os.pwrite(handle, bytes(min(PROBE, size - piece.offset)), piece.offset)
        os.fsync(handle)


@contextlib.contextmanager
def _open(path: str, flags: int) -> Iterator[tuple[int, int]]:
    handle = os.open(path, flags | os.O_CLOEXEC)
    try:
        # md writes to its members past their page cache, which may hold older data of an earlier reader.
        with contextlib.suppress(OSError):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
        yield handle, os.lseek(handle, 0, os.SEEK_END)
    finally:
        os.close(handle)


def _superblocks(read: Reader, size: int) -> Iterator[Piece]:
    for offset in _BTRFS_COPIES:
        block = read(offset, PROBE) if offset + PROBE <= size else b""
        # Each copy names its own offset, so that a copy in a file is none.
        if block[0x40:0x48] == _BTRFS_MAGIC and struct.unpack_from("<Q", block, 0x30)[0] == offset:
            yield Piece(BTRFS, offset, str(uuid.UUID(bytes=block[0x20:0x30])))
    for offset in xfs_groups(size):
        block = read(offset, 512)
        if block[:4] == _XFS_MAGIC and _names_its_group(block, offset):
            yield Piece(XFS, offset, str(uuid.UUID(bytes=block[32:48])))


def _names_its_group(block: bytes, offset: int) -> bool:
    """Whether a copy of an XFS superblock lies at the start of a group of its own file system (xfs_format.h)."""
    group_bytes = int(struct.unpack_from(">I", block, 84)[0]) * int(struct.unpack_from(">I", block, 4)[0])
    return group_bytes > 0 and offset % group_bytes == 0


def xfs_groups(size: int) -> list[int]:
    """Offsets where group 1 of an XFS on a drive of that size probably begins, as mkfs.xfs divides a drive."""
    blocks = size // _XFS_BLOCK
    most = _TIB // _XFS_BLOCK - 1
    sizes = {most}
    for count in range(2, _XFS_MANY + 1):
        # Rounded up or down; or to whole stripes, where the drive names an optimal size of its I/O.
        for length in (blocks // count, -(-blocks // count)):
            sizes.add(length)
            if count <= _XFS_STRIPED:
                sizes.update(-(-length // stripe) * stripe for stripe in _STRIPES)
    return sorted(length * _XFS_BLOCK for length in sizes if 0 < length <= most and (length + 1) * _XFS_BLOCK <= size)


def probes(size: int) -> list[int]:
    """Offsets that are read for data of any kind: every power of two from 1 MiB on, where partitions, copies of
    superblocks and the data of arrays begin, and places that divide the drive evenly. None in the first or last MiB.
    """
    powers = []
    offset = _MIB
    while offset < size:
        powers.append(offset)
        offset *= 2
    evenly = [size * number // _EVENLY // PROBE * PROBE for number in range(1, _EVENLY)]
    return sorted({at for at in powers + evenly if at >= _MIB and at + PROBE <= size - _MIB})


def _data(read: Reader, size: int) -> Iterator[Piece]:
    return (Piece(DATA, offset) for offset in probes(size) if written(read(offset, PROBE)))


def written(block: Iterable[int]) -> bool:
    """Whether somebody wrote this block: it is neither of the patterns of an unwritten or discarded one."""
    data = bytes(block)
    return not any(data == bytes([pattern]) * len(data) for pattern in _UNWRITTEN)
