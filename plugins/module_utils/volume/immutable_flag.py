"""The immutable flag of a directory (chattr +i): root itself cannot write into one that has it.

Without it, data for an absent volume would go to the root file system.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import struct
from dataclasses import dataclass
from typing import Any, Callable, Iterator

from ..common.files import content, lines
from ..common.refusal import Expected
from ..machine.mounts import mount_at, parse_mountinfo

# include/uapi/linux/fs.h. The number says `long`, yet the kernel reads and writes an int.
FS_IMMUTABLE_FL = 0x00000010
FS_APPEND_FL = 0x00000020


def request_number(direction: int, number: int) -> int:
    """``_IOR('f', number, long)`` for direction 2, ``_IOW`` for 1, as on every machine but mips, powerpc and sparc."""
    return direction << 30 | struct.calcsize("l") << 16 | ord("f") << 8 | number


FS_IOC_GETFLAGS = request_number(2, 1)
FS_IOC_SETFLAGS = request_number(1, 2)


def encode_flags(flags: int) -> bytes:
    """The flags as the kernel takes them."""
    return struct.pack("=I", flags)


def decode_flags(answer: bytes) -> int:
    """The flags as the kernel gives them."""
    return int(struct.unpack_from("=I", answer)[0])


def with_immutable(flags: int, wanted: bool) -> int:
    """``flags`` with the one bit as wanted; all others stay."""
    return flags | FS_IMMUTABLE_FL if wanted else flags & ~FS_IMMUTABLE_FL


class Unsupported(Expected):
    """The file system has no such flag, or the kernel does not permit access. The message says which."""


@dataclass(frozen=True)
class Directory:
    """A bare mount point, mounted over or not."""

    exists: bool
    immutable: bool = False
    entries: tuple[str, ...] = ()
    """Names in it, sorted."""


_REASONS = {
    errno.ENOTTY: "its file system has no such flag",
    errno.EOPNOTSUPP: "its file system has no such flag",
    errno.EINVAL: "its file system has no such flag",
    errno.EPERM: "the kernel does not permit it here, as in a container",
    errno.EACCES: "it may not be read",
}


def is_immutable(path: str) -> bool:
    """Whether ``path`` has the flag. Raises ``Unsupported``, or ``FileNotFoundError``."""
    with _opened(path) as handle:
        return bool(_flags(path, handle) & FS_IMMUTABLE_FL)


def forbidding_flag(handle: int) -> str:
    """The letter of chattr for the flag that keeps root from making or removing files in an open directory, or ""."""
    try:
        flags = _flags("", handle)
    except Unsupported:
        return ""
    return "i" if flags & FS_IMMUTABLE_FL else "a" if flags & FS_APPEND_FL else ""


def set_immutable(path: str, wanted: bool) -> None:
    """Set or clear the flag of ``path``, and read it back. Raises ``Unsupported``."""
    with _opened(path) as handle:
        flags = with_immutable(_flags(path, handle), wanted)
        try:
            fcntl.ioctl(handle, FS_IOC_SETFLAGS, encode_flags(flags))
        except OSError as error:
            raise _unsupported(path, error) from None
        if _flags(path, handle) != flags:
            raise Unsupported("`%s`: the flag was not kept" % path)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except PermissionError as error:
        raise _unsupported(path, error) from None
    try:
        yield handle
    finally:
        os.close(handle)


def _flags(path: str, handle: int) -> int:
    try:
        return decode_flags(fcntl.ioctl(handle, FS_IOC_GETFLAGS, encode_flags(0)))
    except OSError as error:
        raise _unsupported(path, error) from None


def _unsupported(path: str, error: OSError) -> Unsupported:
    return Unsupported("`%s`: %s" % (path, _REASONS.get(error.errno or 0, os.strerror(error.errno or 0))))


def look(path: str) -> Directory:
    """The directory at ``path``. Raises ``Unsupported``."""
    try:
        immutable = is_immutable(path)
        return Directory(True, immutable, tuple(sorted(os.listdir(path))))
    except FileNotFoundError:
        return Directory(False)


_CLONE_NEWNS, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x20000, 0x4000, 0x40000, 2


def look_beneath(path: str) -> Directory:
    """The directory that a mount at ``path`` hides. The mount stays as it is. Raises ``Unsupported``."""

    def work() -> dict[str, Any]:
        look_result = look(path)
        return {"exists": look_result.exists, "immutable": look_result.immutable, "entries": list(look_result.entries)}

    answer = _beneath(path, work)
    return Directory(answer["exists"], answer["immutable"], tuple(answer["entries"]))


def set_immutable_beneath(path: str, wanted: bool) -> None:
    """``set_immutable`` for the directory that a mount at ``path`` hides. Raises ``Unsupported``."""

    def work() -> dict[str, Any]:
        set_immutable(path, wanted)
        return {}

    _beneath(path, work)


def _beneath(path: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Do ``work`` with nothing mounted at ``path``: in a child process with its own mount namespace."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            try:
                _leave_mounts(path)
                answer = {"answer": work()}
            except Unsupported as error:
                answer = {"unsupported": {"message": str(error)}}
            except Exception as error:
                answer = {"unsupported": {"message": "`%s`: %s" % (path, error)}}
            os.write(writing, json.dumps(answer).encode("ascii"))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        text = stream.read()
    os.waitpid(child, 0)
    report = (
        json.loads(text)
        if text
        else {"unsupported": {"message": "`%s`: the child process that looks beneath it died" % path}}
    )
    if "unsupported" in report:
        raise Unsupported(report["unsupported"]["message"])
    return dict(report["answer"])


def _leave_mounts(path: str) -> None:
    """Unmount what is mounted at ``path``, in this process only. Raises ``Unsupported`` before touching a shared one.

    Private first: in a shared tree the unmounting would reach the node itself.
    """
    before = os.readlink("/proc/self/ns/mnt")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        raise _unsupported(path, OSError(ctypes.get_errno(), ""))
    if libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) != 0:
        raise _unsupported(path, OSError(ctypes.get_errno(), ""))
    if os.readlink("/proc/self/ns/mnt") == before:
        raise Unsupported("`%s`: a mount namespace of its own is not possible here" % path)
    for _ in range(16):
        text = content("/proc/self/mountinfo")
        if mount_at(path, parse_mountinfo(text)) is None:
            return
        if any(" shared:" in line or " master:" in line for line in lines(text)):
            raise Unsupported("`%s`: its mounts stay shared" % path)
        if libc.umount2(os.fsencode(path), _MNT_DETACH) != 0:
            raise _unsupported(path, OSError(ctypes.get_errno(), ""))
    raise Unsupported("`%s`: too many mounts at one place" % path)
