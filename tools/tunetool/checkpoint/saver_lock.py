"""One saver per directory: a kernel lock, and a file that names its holder.

The kernel releases the lock (flock) when its process ends, for any reason, so on one host the lock alone decides.
Whether it works across hosts depends on the shared file system and its mount options, which cannot be queried. So the
holder also touches the file every ``TOUCH_EVERY`` seconds. A holder on another host counts as dead only if the kernel
grants the lock AND the file was not touched for ``DEAD_AFTER`` seconds by the file server's clock.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

from tunetool.checkpoint.os_errors import SystemRefused
from tunetool.errors import CannotJudge
from tunetool.measure.rundir import process_identity
from tunetool.node.common.file_lock import FileLock

HELD: set[int] = set()


def _forget_in_child() -> None:
    # A forked data loader would hold the lock for as long as it lives, even after its parent's death, or release it
    # while its parent still saves.
    for handle in HELD:
        os.close(handle)
    HELD.clear()


os.register_at_fork(after_in_child=_forget_in_child)


NAME = ".tunetool-save.lock"
TOUCH_EVERY = 20.0
DEAD_AFTER = 120.0
_NO_KERNEL_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True)
class Holder:
    """The process that wrote the lock file. ``started``: Unix time at which its save began.

    ``tokens``: tokens of earlier saves that died and may have left files, then the token of this save.
    """

    host: str
    boot: str
    pid: int
    start: int
    started: float
    tokens: tuple[str, ...] = ()

    @classmethod
    def this_process(cls, *tokens: str) -> Holder:
        who = process_identity(os.getpid())
        return cls(str(who["host"]), str(who["boot"]), os.getpid(), int(str(who["start"])), time.time(), tokens)

    @classmethod
    def parse(cls, text: str) -> Holder | None:
        """The holder in the content of a lock file; None if the content is incomplete."""
        try:
            document = json.loads(text)
            host, boot, started = str(document["host"]), str(document["boot"]), float(document["started"])
            tokens = tuple(str(token) for token in document["tokens"])
            return cls(host, boot, int(document["pid"]), int(document["start"]), started, tokens)
        except (ValueError, KeyError, TypeError):
            return None

    def text(self) -> str:
        return json.dumps(dict(vars(self)))

    def is_gone(self, now: Holder) -> bool:
        """Whether it was a process of this host that has ended. ``now``: this process. False for other hosts."""
        return (self.host, self.boot) == (now.host, now.boot) and not _is_alive(self)

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.started))
        return f"process {self.pid} on `{self.host}`, since {when}"


def dead_by_rule(holder: Holder | None, now: Holder, silent: float, kernel_gave: bool) -> bool:
    """Whether the holder counts as dead if no kernel lock proves that it lives.

    ``kernel_gave``: the kernel granted the lock; otherwise the file system has no kernel locks. ``silent``: seconds
    since the file was touched. Pure, except that it checks the processes of this host.
    """
    if holder is None:
        return kernel_gave or silent > DEAD_AFTER
    if holder.boot == now.boot:
        return kernel_gave or not _is_alive(holder)
    # The same host after a reboot; another host must have been silent, since the kernel lock may be local to this host.
    return holder.host == now.host or silent > DEAD_AFTER


def _is_alive(holder: Holder) -> bool:
    try:
        return process_identity(holder.pid).get("start") == holder.start
    except OSError:
        return False


class Lock:
    """The lock of a directory, held from ``take`` to ``release``. Forked children do not inherit it.

    ``tokens``: tokens of the saves that may have files in the directory; the last one is that of this save.
    """

    def __init__(self, path: Path, handle: int, tokens: tuple[str, ...]) -> None:
        self.tokens = tokens
        stop, guard = threading.Event(), threading.RLock()
        HELD.add(handle)
        # Nobody is notified of a save that fails within torch's collectives: the lock ends with its object.
        self._end = weakref.finalize(self, _end, path, handle, stop, guard, os.getpid())
        threading.Thread(target=_touch, args=(handle, stop, guard), name="tunetool-save-lock", daemon=True).start()

    @classmethod
    def take(cls, directory: Path, token: str = "") -> Lock:
        """Take the lock of ``directory``; the lock of a dead holder is taken over. Raises ``CannotJudge`` naming a live
        one."""
        path = directory / NAME
        now = Holder.this_process(token)
        # The previous holder may remove the file after we open it and before we lock it.
        for _ in range(100):
            lock, is_new = _open(path)
            try:
                kernel_gave = _try_lock(lock)
                if kernel_gave and not lock.is_named():
                    lock.close()
                    continue
                text = lock.note()
                # A process that dies between creating the file and writing to it leaves it empty.
                unclaimed = is_new or (kernel_gave and not text)
                silent = _clock(directory) - os.fstat(lock.handle).st_mtime
                holder = Holder.parse(text)
                if silent < -TOUCH_EVERY:
                    # A time in the future means that the clock was set back. Count the silence from now on; a live
                    # holder continues to touch the file.
                    os.utime(lock.handle)
                if kernel_gave is False or not (unclaimed or dead_by_rule(holder, now, silent, bool(kernel_gave))):
                    raise _busy(directory, holder, silent, now)
                now = replace(now, tokens=(*(holder.tokens if holder else ()), token))
                try:
                    lock.sign(now.text())
                except OSError:
                    # On a full disk an empty file can be made.
                    if is_new:
                        path.unlink()
                    raise
            except BaseException:
                lock.close()
                raise
            return cls(path, lock.handle, now.tokens)
        raise SystemRefused(
            f"`{path}` is created and removed repeatedly", "check which other jobs save to this directory"
        )

    def release(self) -> None:
        """Release the lock and remove the file. A second call does nothing."""
        self._end()


def holder_in(directory: Path) -> Holder | None:
    """The holder named in the lock file of ``directory``, dead or alive; None if there is no lock."""
    try:
        return Holder.parse((directory / NAME).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def _busy(directory: Path, holder: Holder | None, silent: float, now: Holder) -> CannotJudge:
    who = holder or "a process that has just begun"
    hint = "wait for it to end, or save elsewhere"
    if holder is not None and holder.boot != now.boot:
        hint += (
            f"; its last sign of life was {max(silent, 0):.0f} s ago, and it counts as dead after {DEAD_AFTER:.0f} s"
        )
    return SystemRefused.with_number(errno.EBUSY, f"`{directory}` is being saved to by {who}", hint)


def _open(path: Path) -> tuple[FileLock, bool]:
    """The open file, and whether we created it: without kernel locks, only one saver can have created it."""
    try:
        return FileLock(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), path), True
    except FileExistsError:
        pass
    try:
        return FileLock.file(path, 0o644), False
    except OSError:
        # In a directory where others may write, the kernel itself refuses some of their links, with EACCES.
        if not path.is_symlink():
            raise
        raise SystemRefused(f"`{path}` is a link, which no save makes", "remove it, and see who owns it") from None


def _try_lock(lock: FileLock) -> bool | None:
    """Whether the kernel granted the lock; None if the file system has no kernel locks."""
    try:
        return lock.take(patience=0)
    except OSError as error:
        if error.errno in _NO_KERNEL_LOCKS:
            return None
        raise


def _clock(directory: Path) -> float:
    """The current time by the clock that sets file times here, which can be that of another host."""
    with tempfile.TemporaryFile(dir=directory) as probe:
        return os.fstat(probe.fileno()).st_mtime


def _touch(handle: int, stop: threading.Event, guard: threading.RLock) -> None:
    while not stop.wait(TOUCH_EVERY):
        # Guarded, since the number of a closed handle may belong to another file a moment later.
        with guard, contextlib.suppress(OSError):
            if not stop.is_set():
                os.utime(handle)


def _end(path: Path, handle: int, stop: threading.Event, guard: threading.RLock, pid: int) -> None:
    if os.getpid() != pid:
        return
    with guard:
        stop.set()
        if handle not in HELD:
            return
        HELD.discard(handle)
        # Remove it while still locked: a process that has opened it finds another file, or none, at this path and
        # retries.
        with contextlib.suppress(OSError):
            # The kernel knows where the file is if its directory was renamed.
            named = FileLock(handle, path).is_named()
            here = path if named else Path(f"/proc/self/fd/{handle}").readlink()
            if FileLock(handle, here).is_named():
                here.unlink()
        os.close(handle)
