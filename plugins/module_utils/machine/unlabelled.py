"""Contents that libblkid does not see: file systems whose first superblock is gone, and data without any label.

It reads the first and the last MiB of a drive, and a block in some thousand places between. What it finds is there; a
drive on which it finds nothing may still hold data elsewhere: docs/concepts/never.md says how much.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import struct
import uuid
from dataclasses import dataclass
from typing import Callable, Iterator

BTRFS, XFS, DATA = "btrfs without its first superblock", "xfs without its first superblock", "data without a label"
PROBE = 4096
_MIB, _GIB, _TIB = 2**20, 2**30, 2**40
END = _MIB
"""Bytes at each end of a drive that are read whole: what has no label begins there (LUKS with a detached header, a tar,
a database), and there a plan knows a drive again."""

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
_EVENLY = 4096
_APART = 16 * _MIB
"""Bytes between even places on a small drive, which has fewer of them."""
_STEPS = 4
"""Places between one power of two and the next."""
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
    """The first contents of the device without a label that are found: superblocks, and data in the first and last MiB.

    ``deep``: also data of no known kind between them. Raises ``OSError``.
    """
    with _open(path, os.O_RDONLY) as (read, _, size):
        found = next(_superblocks(read, size), None) or next(_at_the_ends(read, size), None)
        return found or (next(_between(read, size), None) if deep else None)


def look_at_ends(path: str) -> Piece | None:
    """The first data of any kind in the first and the last MiB. Raises ``OSError``."""
    with _open(path, os.O_RDONLY) as (read, _, size):
        return next(_at_the_ends(read, size), None)


def fingerprint(path: str) -> str:
    """sha256 of all that ``look`` reads: equal while nobody writes there. Raises ``OSError``."""
    digest = hashlib.sha256()
    with _open(path, os.O_RDONLY) as (read, _, size):
        blocks = {*probes(size), *(at for at in (*_BTRFS_COPIES, *xfs_groups(size)) if at + PROBE <= size)}
        for start, length in [*_ends(size), *((at, PROBE) for at in sorted(blocks))]:
            digest.update(b"%d:%d:" % (start, length))
            digest.update(read(start, length))
    return digest.hexdigest()


def clear_between(path: str) -> None:
    """Overwrite with zeros what ``look`` finds between the first and the last MiB. Raises ``OSError``.

    By these two a plan knows the drive again: after an interruption the same plan goes on.
    """
    with _open(path, os.O_RDWR | os.O_EXCL) as (read, handle, size):
        for piece in [*_superblocks(read, size), *_between(read, size)]:
            os.pwrite(handle, bytes(min(PROBE, size - piece.offset)), piece.offset)
        os.fsync(handle)


def clear_ends(path: str) -> None:
    """Overwrite the first and the last MiB with zeros, which is the last step to a blank drive. Raises ``OSError``."""
    with _open(path, os.O_RDWR | os.O_EXCL) as (_, handle, size):
        for start, length in _ends(size):
            os.pwrite(handle, bytes(length), start)
        os.fsync(handle)


@contextlib.contextmanager
def _open(path: str, flags: int) -> Iterator[tuple[Reader, int, int]]:
    handle = os.open(path, flags | os.O_CLOEXEC)

    def read(offset: int, length: int) -> bytes:
        parts: list[bytes] = []
        while length > 0:
            part = os.pread(handle, length, offset)
            # A read ends early at a block that cannot be read, without an error: what is behind it is not known.
            if not part:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return b"".join(parts)

    try:
        # md writes to its members past their page cache, which may hold older data of an earlier reader.
        with contextlib.suppress(OSError):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
        yield read, handle, os.lseek(handle, 0, os.SEEK_END)
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
    """Offsets of the blocks that are read for data of any kind between the first and the last MiB.

    Powers of two from either end and quarters between them, where partitions, copies of superblocks and the data of
    arrays begin; and places that divide the drive evenly, 4,096 on a large one.
    """
    powers = [
        power * step // _STEPS for bit in range(20, 63) for power in (2**bit,) for step in range(_STEPS, 2 * _STEPS)
    ]
    near = [at for power in powers if power < size for at in (power, (size - power) // PROBE * PROBE)]
    count = max(1, min(_EVENLY, size // _APART))
    evenly = [size * number // count // PROBE * PROBE for number in range(1, count)]
    return sorted({at for at in near + evenly if at >= END and at + PROBE <= size - END})


def _ends(size: int) -> list[tuple[int, int]]:
    """Start and length of the first and the last MiB; of a smaller drive, of all of it."""
    if size <= 2 * END:
        return [(0, size)] if size else []
    return [(0, END), (size - END, END)]


def _at_the_ends(read: Reader, size: int) -> Iterator[Piece]:
    for start, length in _ends(size):
        data = read(start, length)
        for at in range(0, len(data), PROBE):
            if written(data[at : at + PROBE]):
                yield Piece(DATA, start + at)


def _between(read: Reader, size: int) -> Iterator[Piece]:
    return (Piece(DATA, offset) for offset in probes(size) if written(read(offset, PROBE)))


def written(block: bytes) -> bool:
    """Whether somebody wrote this block: it is neither of the patterns of an unwritten or discarded one."""
    return not any(block.count(pattern) == len(block) for pattern in _UNWRITTEN)
