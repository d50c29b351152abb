"""One saver per directory: a kernel lock, and a file that names who holds it.

The kernel's lock (flock) ends with its process, however that ends, so on one host it alone decides. Whether it reaches
other hosts depends on the shared file system and its mount options, which cannot be asked. So the holder also touches
the file every ``TOUCH_EVERY`` seconds, and what another host holds is only taken for dead once the kernel gives the
lock AND the file has not been touched for ``DEAD_AFTER`` seconds by the file server's clock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.measure.rundir import process_identity

NAME = ".tunetool-save.lock"
TOUCH_EVERY = 20.0
DEAD_AFTER = 120.0
_NO_KERNEL_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_held: set[int] = set()


def _forget_in_child() -> None:
    # A forked loader of data would hold the lock for as long as it lives, after its parent's death too.
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


@dataclass(frozen=True)
class Holder:
    """Who wrote the file. ``started`` is Unix time, when the save began.

    ``tokens``: that save's, last, and those of earlier ones that died and may have left files.
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
        """None for a file that its writer did not finish."""
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
        """Whether it was a process of this host that is no more. ``now``: this process. False for other hosts."""
        return (self.host, self.boot) == (now.host, now.boot) and not _lives(self)

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.started))
        return f"process {self.pid} on `{self.host}`, since {when}"


def dead_by_rule(holder: Holder | None, now: Holder, silent: float, kernel_gave: bool) -> bool:
    """Whether who wrote the file is gone, where no kernel lock says that it lives.

    ``kernel_gave``: the kernel's lock was to be had; else the file system has none. ``silent``: seconds since the file
    was touched. Pure, but for a look at this host's processes.
    """
    if holder is None:
        return kernel_gave or silent > DEAD_AFTER
    if holder.boot == now.boot:
        return kernel_gave or not _lives(holder)
    # The same host after a reboot; another host must have been silent, since the kernel's lock may end at this one.
    return holder.host == now.host or silent > DEAD_AFTER


def _lives(holder: Holder) -> bool:
    try:
        return process_identity(holder.pid).get("start") == holder.start
    except OSError:
        return False


class Lock:
    """Held from ``take`` to ``release``. Not for children of a fork, which lose it.

    ``tokens``: of the saves whose files may lie in the directory, the own one last.
    """

    def __init__(self, path: Path, handle: int, tokens: tuple[str, ...]) -> None:
        self.tokens = tokens
        stop, guard = threading.Event(), threading.RLock()
        _held.add(handle)
        # A save that fails in the middle of torch's collectives is told to nobody: the lock ends with its object.
        self._end = weakref.finalize(self, _end, path, handle, stop, guard, os.getpid())
        threading.Thread(target=_touch, args=(handle, stop, guard), name="tunetool-save-lock", daemon=True).start()

    @classmethod
    def take(cls, directory: Path, token: str = "") -> Lock:
        """Raises ``CannotJudge`` naming a live holder; the lock of a dead one is taken over."""
        path = directory / NAME
        now = Holder.this_process(token)
        # Whoever held it may remove the file between our opening and our locking it.
        for _ in range(100):
            handle, is_new = _open(path)
            try:
                kernel_gave = _try_lock(handle)
                if kernel_gave and not _is_at(handle, path):
                    os.close(handle)
                    continue
                text = os.pread(handle, 65536, 0).decode("utf-8", "replace")
                # Who dies between making the file and writing to it leaves it empty.
                unclaimed = is_new or (kernel_gave and not text)
                silent = _clock(directory) - os.fstat(handle).st_mtime
                holder = Holder.parse(text)
                if silent < -TOUCH_EVERY:
                    # No sign of life is from the future: the clock was set back. From now on silence counts again, and
                    # a holder that lives goes on touching it.
                    os.utime(handle)
                if kernel_gave is False or not (unclaimed or dead_by_rule(holder, now, silent, bool(kernel_gave))):
                    raise _busy(directory, holder, silent, now)
                now = replace(now, tokens=(*(holder.tokens if holder else ()), token))
                text = now.text()
                os.pwrite(handle, text.encode(), 0)
                os.ftruncate(handle, len(text))
            except BaseException:
                os.close(handle)
                raise
            return cls(path, handle, now.tokens)
        raise CannotJudge(f"`{path}` is made and removed all the time", "see who else saves to this directory")

    def release(self) -> None:
        """Give it up and remove the file. Does nothing the second time."""
        self._end()


def holder_in(directory: Path) -> Holder | None:
    """What the lock in ``directory`` says, whether or not its holder lives; None where there is none."""
    try:
        return Holder.parse((directory / NAME).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def _busy(directory: Path, holder: Holder | None, silent: float, now: Holder) -> CannotJudge:
    who = holder or "a process that has just begun"
    hint = "wait for it to end, or save elsewhere"
    if holder is not None and holder.boot != now.boot:
        hint += (
            f"; it gave its last sign of life {max(silent, 0):.0f} s ago, and after {DEAD_AFTER:.0f} s counts as dead"
        )
    return CannotJudge(f"`{directory}` is being saved to by {who}", hint)


def _open(path: Path) -> tuple[int, bool]:
    """The file, and whether we made it: without kernel locks only one saver can have done that."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), True
    except FileExistsError:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644), False


def _try_lock(handle: int) -> bool | None:
    """None where the file system has no kernel locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_KERNEL_LOCKS:
            return None
        raise
    return True


def _is_at(handle: int, path: Path) -> bool:
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    held = os.fstat(handle)
    return (status.st_dev, status.st_ino) == (held.st_dev, held.st_ino)


def _clock(directory: Path) -> float:
    """Now, by the clock that stamps files here: another host's may differ from ours."""
    with tempfile.TemporaryFile(dir=directory) as probe:
        return os.fstat(probe.fileno()).st_mtime


def _touch(handle: int, stop: threading.Event, guard: threading.RLock) -> None:
    while not stop.wait(TOUCH_EVERY):
        # Guarded, since a handle that is closed may be another file's a moment later.
        with guard, contextlib.suppress(OSError):
            if not stop.is_set():
                os.utime(handle)


def _end(path: Path, handle: int, stop: threading.Event, guard: threading.RLock, pid: int) -> None:
    if os.getpid() != pid:
        return
    with guard:
        stop.set()
        if handle not in _held:
            return
        _held.discard(handle)
        # Removed while still locked: who opened it before finds another file, or none, at this path and begins again.
        with contextlib.suppress(OSError):
            if _is_at(handle, path):
                path.unlink()
        os.close(handle)
