"""What Python's library lacks: project numbers and limits of XFS, and directories opened without crossing a mount.

The calls are made on open directories, so no path of a user's is followed. Numbers and layouts are of
include/uapi/linux/fs.h, dqblk_xfs.h and openat2.h, the same on x86-64 and arm64, for Linux 5.14 and later.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_OPEN_TREE, _OPENAT2, _QUOTACTL_FD = 428, 437, 443
_CLONE, _EMPTY_PATH = 1, 0x1000
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 1, 2, 4, 8
_MNT_DETACH = 2
_GET_ATTRIBUTES, _SET_ATTRIBUTES = 0x801C581F, 0x401C5820
_ATTRIBUTES = struct.Struct("=IIIII8s")
"""struct fsxattr: flags, extent size, extents, project, extent size for copies on write."""
_IMMUTABLE, _APPEND_ONLY, PROJECT_INHERITED = 0x8, 0x10, 0x200
QUOTA = struct.Struct("=bbHI6QiiHH4b3QiHh8s")
"""struct fs_disk_quota."""
_PROJECT = 2
_GET_QUOTA, _SET_LIMITS = (0x5803 << 8) | _PROJECT, (0x5804 << 8) | _PROJECT
_OF_A_PROJECT, _OF_BLOCKS_AND_FILES = 2, 0xF
BLOCK = 512
"""Bytes in which XFS counts a quota."""


def _checked(answer: int, name: str = "") -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name or None)
    return answer


def _call(number: int, *arguments: Any) -> int:
    return _checked(_LIBC.syscall(ctypes.c_long(number), *arguments))


def open_inside(directory: int, name: str) -> int:
    """Open a directory in an open one. Raises ``OSError``: EXDEV where something is mounted there, ELOOP or ENOTDIR
    where there is something else."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    how = struct.pack("=QQQ", flags, 0, _NO_XDEV | _NO_MAGICLINKS | _NO_SYMLINKS | _BENEATH)
    return _call(_OPENAT2, ctypes.c_long(directory), os.fsencode(name), how, ctypes.c_size_t(len(how)))


def uncovered(directory: int) -> int:
    """Open an open directory again so that no mount lies over anything in it. Raises ``OSError``."""
    flags = ctypes.c_uint(_CLONE | _EMPTY_PATH | os.O_CLOEXEC)
    return _call(_OPEN_TREE, ctypes.c_long(directory), b"", flags)


def detach(directory: int, name: str) -> None:
    """Unmount what is mounted at a name in an open directory, and no other mount. Raises ``OSError``: EINVAL where
    nothing is."""
    # It is not asked anything: a dead file system of the user's (FUSE) would not answer.
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        _checked(_LIBC.umount2(b"/proc/self/fd/%d" % handle, _MNT_DETACH), name)
    finally:
        os.close(handle)


def _attributes(handle: int) -> list[Any]:
    return list(_ATTRIBUTES.unpack(fcntl.ioctl(handle, _GET_ATTRIBUTES, bytes(_ATTRIBUTES.size))))


def set_project(directory: int, project: int) -> None:
    """Count what is made in a directory from now on for a project. Raises ``OSError``."""
    attributes = _attributes(directory)
    attributes[0] |= PROJECT_INHERITED
    attributes[3] = project
    fcntl.ioctl(directory, _SET_ATTRIBUTES, _ATTRIBUTES.pack(*attributes))


def seize(directory: int) -> None:
    """Make an open directory root's alone: who has it open adds nothing, anything may be moved into it, and it counts
    for no project. Raises ``OSError``."""
    attributes = _attributes(directory)
    kept = attributes[0] & ~(_IMMUTABLE | _APPEND_ONLY | PROJECT_INHERITED)
    if [kept, 0] != [attributes[0], attributes[3]]:
        attributes[0], attributes[3] = kept, 0
        fcntl.ioctl(directory, _SET_ATTRIBUTES, _ATTRIBUTES.pack(*attributes))
    os.fchown(directory, 0, 0)
    os.fchmod(directory, 0o700)


def unprotect(directory: int, name: str) -> bool:
    """Take the flags away with which not even root removes a file or directory; false where it has none.

    Raises ``OSError``.
    """
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return False
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    try:
        return unprotect_open(handle)
    finally:
        os.close(handle)


def unprotect_open(handle: int) -> bool:
    """The same for what is open."""
    attributes = _attributes(handle)
    if not attributes[0] & (_IMMUTABLE | _APPEND_ONLY):
        return False
    attributes[0] &= ~(_IMMUTABLE | _APPEND_ONLY)
    fcntl.ioctl(handle, _SET_ATTRIBUTES, _ATTRIBUTES.pack(*attributes))
    return True


def set_limits(handle: int, project: int, size: int, files: int) -> None:
    """Limit the bytes and the files of a project, or neither where they are 0. Raises ``OSError``."""
    fields = [1, _OF_A_PROJECT, _OF_BLOCKS_AND_FILES, project, size // BLOCK, 0, files, 0, *[0] * 16, bytes(8)]
    _quota(handle, _SET_LIMITS, project, QUOTA.pack(*fields))


def used(handle: int, project: int) -> tuple[int, int]:
    """The bytes and the files that are counted for a project. Raises ``OSError``."""
    try:
        answer = _quota(handle, _GET_QUOTA, project, bytes(QUOTA.size))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):
            return 0, 0
        raise
    fields = QUOTA.unpack(answer)
    return fields[8] * BLOCK, fields[9]


def _quota(handle: int, command: int, project: int, block: bytes) -> bytes:
    buffer = ctypes.create_string_buffer(block, len(block))
    _call(_QUOTACTL_FD, ctypes.c_uint(handle), ctypes.c_uint(command), ctypes.c_uint(project), buffer)
    return buffer.raw
