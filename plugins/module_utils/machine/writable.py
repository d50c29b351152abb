"""Whether files can be written that later steps write: asked before the first step that nobody can take back."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import Iterable

from .mounts import mount_holding, read_mounts

_LEAST_BYTES = 2**20
_LEAST_FILES = 16
"""Configuration of a few KiB in a few files, and room for what the system itself writes meanwhile."""


@dataclass(frozen=True)
class Later:
    """A file that a later step writes, by rename in its directory."""

    path: str
    bytes: int = 0
    """Its size, where it is not small."""


def unwritable(files: Iterable[Later], root: str = "/") -> list[str]:
    """Why files could not be written, a line for each cause with its cure; nothing is written for that."""
    causes: dict[str, list[str]] = {}
    for later in files:
        cause = _cause(later, root)
        if cause:
            causes.setdefault(cause, []).append("`%s`" % later.path)
    return ["%s %s" % (", ".join(dict.fromkeys(paths)), cause) for cause, paths in causes.items()]


def _cause(later: Later, root: str) -> str | None:
    path = os.path.realpath(os.path.join(root, later.path.lstrip("/")))
    directory = os.path.dirname(path)
    while not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    mount = mount_holding(directory, read_mounts())
    on = mount.mount_point if mount else directory
    try:
        status = os.statvfs(directory)
    except OSError as error:
        return "cannot be written: `%s`: %s. hint: %s" % (on, error.strerror, cure(error.errno or 0, on))
    if status.f_flag & os.ST_RDONLY:
        return "cannot be written: `%s` is read-only. hint: %s" % (on, cure(errno.EROFS, on))
    if not os.access(directory, os.W_OK) or (os.path.isfile(path) and not os.access(path, os.W_OK)):
        return "cannot be written: `%s` does not allow it. hint: %s" % (directory, cure(errno.EPERM, directory))
    # Blocks that only root may use count: it is root who writes.
    free = (status.f_bfree if os.geteuid() == 0 else status.f_bavail) * status.f_frsize
    wanted = later.bytes + _LEAST_BYTES
    if free < wanted:
        text = "cannot be written: `%s` has %d KiB free, and %d KiB are needed. hint: %s"
        return text % (on, free // 1024, -(-wanted // 1024), cure(errno.ENOSPC, on))
    if status.f_files and status.f_ffree < _LEAST_FILES:
        text = "cannot be written: `%s` has room for %d more files, and %d are needed. hint: %s"
        return text % (on, status.f_ffree, _LEAST_FILES, cure(errno.ENOSPC, on))
    return None


def failed_write(error: OSError) -> str:
    """The message of a step on files that failed, with its cure."""
    path = str(error.filename or "")
    name = os.path.basename(path)
    if name.startswith(".") and ".tunetool-" in name:
        path = os.path.join(os.path.dirname(path), name[1:].partition(".tunetool-")[0])
    shown = "`%s`: %s" % (path, error.strerror) if path else str(error)
    directory = os.path.dirname(path) or "/"
    mount = mount_holding(os.path.realpath(directory), read_mounts())
    place = directory if error.errno in (errno.EPERM, errno.EACCES) or mount is None else mount.mount_point
    return "%s. hint: %s, then run again: it goes on" % (shown, cure(error.errno or 0, place))


def cure(number: int, place: str) -> str:
    """What to do about an error of a write. ``place``: the mount point; for a refused permission, the directory."""
    if number == errno.EROFS:
        return "see in `dmesg` why, then `mount -o remount,rw %s`" % place
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "make room on `%s`: `du -xh %s | sort -h | tail` and `df -i %s` show what fills it" % ((place,) * 3)
    if number in (errno.EPERM, errno.EACCES):
        return "`lsattr -d %s` shows what protects it, and `chattr -i` takes that away" % place
    return "see in `dmesg` and with `ls -ld %s` what stops it" % place
