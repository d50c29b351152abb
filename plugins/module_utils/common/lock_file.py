"""Lock files that others cannot have made first: whoever owns one can hold its lock for as long as they like."""

from __future__ import annotations

import errno
import os
import pwd

from .refusal import on_one_line


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
