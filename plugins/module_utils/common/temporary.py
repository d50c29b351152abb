"""Temporary files and directories that a killed process leaves, which the next one removes: each is locked while its
process lives."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import socket
import stat
import tempfile
import uuid
from typing import Sequence

from .file_lock import FileLock

_RANDOM = re.compile(r"[a-z0-9_]{8}")
"""What ``tempfile`` adds to a prefix."""
_MOST_NAMES = 100_000
"""Names of a shared directory that are looked at: a job may keep millions of files there."""
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def new_file(prefix: str, directory: str) -> tuple[int, str]:
    """A handle and the path of a new file. Once the handle is closed, it counts as left over."""
    while True:
        handle, path = tempfile.mkstemp(prefix=prefix, dir=directory)
        if _lock(handle, path):
            return handle, path


def new_directory(prefix: str, directory: str) -> tuple[int, str]:
    """A handle and the path of a new directory. See ``new_file``."""
    while True:
        path = tempfile.mkdtemp(prefix=prefix, dir=directory)
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(path, _FLAGS | os.O_DIRECTORY)
            if _lock(handle, path):
                return handle, path


def prefix_of_this_host(name: str) -> str:
    """``NAME-HOST-BOOT-``: what only processes that see each other's locks of a directory have in common."""
    # Two hosts may have one name. Where the boot is not known, nothing counts as left over.
    boot = uuid.uuid4().hex
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
        boot = stream.read()
    return "%s-%s-%s-" % (name, re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname()), boot[:8])


def remove_stale_files(prefix: str, directory: str) -> None:
    """Remove the files that ``new_file`` made there for this user, where the process has ended.

    Where the file system has no locks, or where the directory cannot be listed, nothing is removed.
    """
    _remove_stale(prefix, directory, stat.S_IFREG)


def remove_stale_directories(prefix: str, directory: str) -> None:
    """As ``remove_stale_files``, for what ``new_directory`` made.

    ``prefix``: of ``prefix_of_this_host``. On NFS and Lustre only the processes of one host see each other's lock of a
    directory.
    """
    _remove_stale(prefix, directory, stat.S_IFDIR)


def remove_stale_directories_of(contents: Sequence[str], prefix: str, directory: str) -> None:
    """As ``remove_stale_directories``, where others may write to ``directory`` too, who could put their own in place.

    So only the files named in ``contents`` are removed, and then what is empty. At most the first 100,000 names are
    looked at.
    """
    _remove_stale(prefix, directory, stat.S_IFDIR, contents, _MOST_NAMES)


def _remove_stale(
    prefix: str, directory: str, kind: int, contents: Sequence[str] | None = None, most: int | None = None
) -> None:
    names: list[str] = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in itertools.islice(entries, most):
            if entry.name.startswith(prefix) and _RANDOM.fullmatch(entry.name[len(prefix) :]):
                names.append(entry.name)
    for name in names:
        with contextlib.suppress(OSError):
            _remove_if_stale(os.path.join(directory, name), kind, contents)


def _remove_if_stale(path: str, kind: int, contents: Sequence[str] | None) -> None:
    with FileLock(os.open(path, _FLAGS), path) as lock:
        status = os.fstat(lock.handle)
        if status.st_uid != os.geteuid() or stat.S_IFMT(status.st_mode) != kind:
            return
        if not (lock.take(patience=0) and lock.is_named()):
            return
        if contents is not None:
            for name in contents:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=lock.handle)
            os.rmdir(path)
        elif kind == stat.S_IFDIR:
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)


def _lock(handle: int, path: str) -> bool:
    """Lock what was just made; false, and the handle is closed, if another process took it for a leftover before."""
    lock = FileLock(handle, path)
    with contextlib.suppress(OSError):  # without locks, no process finds out that it is stale either
        lock.take()
    if lock.is_named():
        return True
    lock.close()
    return False
