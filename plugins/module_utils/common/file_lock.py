"""Locks of the kernel on files and directories: the one place that takes them. Each ends with its process, however that
ends, unless a child has inherited it. ``only_one`` is the node's: one change at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
from typing import Callable, Iterator, Optional, Union

from .refusal import Expected, on_one_line
from .waiting import wait_for

Name = Union[str, "os.PathLike[str]"]
_LONGEST_NOTE = 1 << 16
LOCK_PATH = "/run/tunetool.lock"
_held: list[int] = []


class FileLock:
    """An open file or directory that this process can lock. As a context it is closed at the end, which ends the lock.

    ``handle``: of the open file; ``path``: its name, for ``is_named``.
    """

    def __init__(self, handle: int, path: Name = "") -> None:
        self.handle = handle
        self._path = path

    @classmethod
    def on(cls, path: Name) -> FileLock:
        """Of a file, directory or device that is there. Raises ``OSError``."""
        return cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path)

    @classmethod
    def file(cls, path: Name, mode: int = 0o666, make: bool = True) -> FileLock:
        """Of a lock file, which is made where there is none; a link there is not followed. Raises ``OSError``."""
        # To be written: over NFS an exclusive lock needs that.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if make else 0)
        return cls(os.open(path, flags, mode), path)

    @classmethod
    def our_file(cls, path: Name) -> FileLock:
        """Of a lock file in a directory where others may write, which is made for this user alone.

        Raises ``ForeignLock`` where another user but root made it, or where a link lies there; ``OSError``.
        """
        return cls(_open_ours(path), path)

    def take(
        self,
        shared: bool = False,
        patience: Optional[float] = None,
        pause: float = 0.1,
        tick: Callable[[], object] = lambda: None,
    ) -> bool:
        """Lock it; false where another process still holds it after ``patience`` seconds, which may be 0.

        Without ``patience`` it waits as long as that takes. ``pause``, ``tick``: see ``wait_for``. Raises ``OSError``
        where the file system has no locks.
        """
        how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        if patience is None:
            fcntl.flock(self.handle, how)
            return True
        return wait_for(lambda: self._try(how | fcntl.LOCK_NB), patience, pause, tick)

    def _try(self, how: int) -> bool:
        try:
            fcntl.flock(self.handle, how)
        except BlockingIOError:
            return False
        return True

    def is_named(self) -> bool:
        """Whether its name still leads to it: another process may have removed a lock file that was waited for."""
        try:
            return os.path.samestat(os.fstat(self.handle), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def sign(self, note: str) -> None:
        """Write into the lock file who holds it."""
        text = note.encode()
        # Not emptied first: who is killed in between leaves the note before.
        os.pwrite(self.handle, text, 0)
        os.ftruncate(self.handle, len(text))

    def note(self) -> str:
        """What its holder has written."""
        return os.pread(self.handle, _LONGEST_NOTE, 0).decode("utf-8", "replace").strip()

    def free(self) -> None:
        """End the lock for those too that inherited it, as closing does not."""
        fcntl.flock(self.handle, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self.handle)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ForeignLock(Exception):
    """Another user's file, or a link, is where a lock file belongs. ``hint`` says what to do."""

    def __init__(self, message: str, hint: str) -> None:
        self.message, self.hint = on_one_line(message), on_one_line(hint)
        super().__init__(self.message)


def _open_ours(path: Name) -> int:
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


def _owner_at(path: Name) -> int | None:
    try:
        return os.lstat(path).st_uid
    except OSError:
        return None


def _refuse(path: Name, owner: int | None, error: OSError) -> None:
    if owner is None:
        return
    if error.errno == errno.ELOOP or owner != os.geteuid():
        # fs.protected_regular refuses to open it, even to root.
        raise _foreign(path, owner, error.errno == errno.ELOOP) from None


def _foreign(path: Name, owner: int, is_link: bool = False) -> ForeignLock:
    return ForeignLock(
        "`%s` cannot be locked: it is a %s of %s" % (path, "link" if is_link else "file", _name(owner)),
        "remove it (`rm %s`), which its owner and root can" % path,
    )


def _name(owner: int) -> str:
    try:
        return "user `%s`" % pwd.getpwuid(owner).pw_name
    except KeyError:
        return "user %d" % owner


class Locked(Expected):
    """Another run holds the lock. The message names its process."""


@contextlib.contextmanager
def only_one(path: str = LOCK_PATH, patience: float = 600.0) -> Iterator[None]:
    """Hold the node's lock; wait ``patience`` seconds for it, then raise ``Locked``.

    A playbook that is interrupted leaves the module it had started running on the node. Without this, the next run
    would start a second ``update-initramfs`` beside the first, and both write the same file. Programs that are started
    with ``held`` hold it too, so that it is not free before what a killed module left running has ended.
    """
    with FileLock.file(path, 0o600) as lock:
        if not lock.take(patience=patience, pause=1.0):
            raise Locked(
                "another run of tunetool is changing this node (process %s). hint: wait for it to end; "
                "if it is gone, `fuser -v %s` names what it left running" % (lock.note() or "unknown", path)
            )
        lock.sign("%d\n" % os.getpid())
        _held.append(lock.handle)
        try:
            yield
        finally:
            _held.remove(lock.handle)
        # Not only closed: a service that was started meanwhile may have inherited it. After an error it may be a
        # program that did not end in time, and that still changes the node.
        lock.free()


def held() -> tuple[int, ...]:
    """The handles of the lock in this process, for ``pass_fds`` of programs that change the node."""
    return tuple(_held)
