"""The node's lock: one change at a time. Whoever owns a lock file can hold it, so nobody else may have made it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import time
from typing import Iterator

from .refusal import Expected, on_one_line

LOCK_PATH = "/run/tunetool.lock"
_held: list[int] = []


class Locked(Expected):
    """Another run holds the lock. The message names its process."""


@contextlib.contextmanager
def only_one(path: str = LOCK_PATH, patience: float = 600.0) -> Iterator[None]:
    """Hold the node's lock; wait ``patience`` seconds for it, then raise ``Locked``.

    A playbook that is interrupted leaves the module it had started running on the node. Without this, the next run
    would start a second ``update-initramfs`` beside the first, and both write the same file. Programs that are started
    with ``held`` hold it too, so that it is not free before what a killed module left running has ended.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    owner = os.pread(handle, 32, 0).decode("ascii", "replace").strip() or "unknown"
                    raise Locked(
                        "another run of tunetool is changing this node (process %s). hint: wait for it to end; "
                        "if it is gone, `fuser -v %s` names what it left running" % (owner, path)
                    ) from None
                time.sleep(1.0)
        os.ftruncate(handle, 0)
        os.pwrite(handle, b"%d\n" % os.getpid(), 0)
        _held.append(handle)
        try:
            yield
        finally:
            _held.remove(handle)
        # Not only closed: a service that was started meanwhile may have inherited it. After an error it may be a
        # program that did not end in time, and that still changes the node.
        fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def held() -> tuple[int, ...]:
    """The handles of the lock in this process, for ``pass_fds`` of programs that change the node."""
    return tuple(_held)


class ForeignLock(Exception):
    """Another user's file, or a link, is where a lock file belongs. ``hint`` says what to do."""

    def __init__(self, message: str, hint: str) -> None:
        self.message, self.hint = on_one_line(message), on_one_line(hint)
        super().__init__(self.message)


def open_lock_file(path: str) -> int:
    """A handle of the lock file at ``path``, which is made where there is none, for this user alone.

    Raises ``ForeignLock`` where another user but root made it, or where a link lies there; ``OSError``.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        # On an NFS server that trusts no root, what root makes belongs to another user.
        return os.open(path, flags | os.O_EXCL, 0o600)
    except FileExistsError:
        pass
    try:
        handle = os.open(path, flags, 0o600)
    except OSError as error:
        _refuse(path, _owner_at(path), error)
        raise
    owner = os.fstat(handle).st_uid
    if owner in (0, os.geteuid()):
        return handle
    os.close(handle)
    raise _foreign(path, owner)


def _owner_at(path: str) -> int | None:
    try:
        return os.lstat(path).st_uid
    except OSError:
        return None


def _refuse(path: str, owner: int | None, error: OSError) -> None:
    if owner is None:
        return
    if error.errno == errno.ELOOP or owner != os.geteuid():
        # fs.protected_regular refuses to open it, even to root.
        raise _foreign(path, owner, error.errno == errno.ELOOP) from None


def _foreign(path: str, owner: int, is_link: bool = False) -> ForeignLock:
    return ForeignLock(
        "`%s` cannot be locked: it is a %s of %s" % (path, "link" if is_link else "file", _name(owner)),
        "remove it (`rm %s`), which its owner and root can" % path,
    )


def _name(owner: int) -> str:
    try:
        return "user `%s`" % pwd.getpwuid(owner).pw_name
    except KeyError:
        return "user %d" % owner
