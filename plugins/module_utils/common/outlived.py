"""A child process that this process outlives: for whatever may wait for ever.

Nothing ends a process that waits for a dead drive, a frozen file system or a server that is gone, SIGKILL neither. So a
child does what may, nobody waits for it longer than a limit, and while it hangs there is no second one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import select
import signal
import stat
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Sequence, Union

from .file_lock import FileLock, ForeignLock
from .files import make_run_directory
from .waiting import wait_for

_REAP_SECONDS = 1.0
_PAUSE = 0.05
"""Seconds between two tries to start a child where another call is at the same errand."""
_LONGEST = 1 << 20
"""Bytes that are taken of a child that says more than it is listened to."""
Say = Callable[..., None]
"""Sends a message: its names and values, as JSON has them."""
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """What a child has said."""

    messages: Messages = ()
    ended: bool = True
    """Whether it ended in time."""
    hangs_since: float | None = None
    """Seconds for which an earlier child hangs, so that none was started now."""
    note: Mapping[str, Any] = field(default_factory=dict)
    """What was noted of that one."""


def _nothing(messages: Messages, ended: bool) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Errand:
    """What a child is to do."""

    act: Callable[[Say], None]
    name: str
    """Of what there is no second one of."""
    note: Callable[[Messages, bool], Mapping[str, Any]] = _nothing
    """Of the messages and whether the child ended, what the next call gets if it hangs still."""


def in_a_child(
    act: Callable[[Say], None],
    name: str,
    patience: float,
    note: Callable[[Messages, bool], Mapping[str, Any]] = _nothing,
    directory: str | None = None,
) -> Outcome:
    """Let a child do ``act``, and take what it says within ``patience`` seconds. Raises ``OSError``, ``ForeignLock``.

    ``name``, ``note``: see ``Errand``. ``directory``: of the lock; None: that of this user, who may have none.
    """
    (outcome,) = in_children([Errand(act, name, note)], patience, directory)
    if isinstance(outcome, Outcome):
        return outcome
    raise outcome


def in_children(
    errands: Sequence[Errand], patience: float, directory: str | None = None
) -> list[Union[Outcome, OSError, ForeignLock]]:
    """As ``in_a_child``, a child for each errand, all at the same time: what came of each, in their order.

    However many hang, it takes ``patience`` seconds, and as much again at most where a call beside this one is at the
    same errands. An error stands for the errand of which no child could be started.
    """
    children = [_Child(errand, patience) for errand in errands]
    try:
        for each in children:
            each.open(directory)
        _attend(children, patience)
    finally:
        outcomes = [each.close() for each in children]
        _reap([each.pid for each in children if each.pid])
    return outcomes


class _Child:
    """The child of an errand: its lock, its process, and what it has said."""

    def __init__(self, errand: Errand, patience: float) -> None:
        self.errand, self._patience = errand, patience
        self.pid, self.ended = 0, False
        self.reading = -1
        self.until = 0.0
        """When patience with it ends, once it was started."""
        self.error: Union[OSError, ForeignLock, None] = None
        self._outcome: Union[Outcome, OSError, ForeignLock, None] = None
        self._lock: FileLock | None = None
        self._is_locked = False
        self._text = b""

    def open(self, directory: str | None) -> None:
        """Open its lock file."""
        try:
            if directory is None:
                directory = make_run_directory() if os.geteuid() == 0 else os.environ.get("XDG_RUNTIME_DIR")
            name = "%s.lock" % re.sub(r"[^A-Za-z0-9]+", "-", self.errand.name)
            self._is_locked = not directory
            self._lock = FileLock.our_file(os.path.join(directory, name)) if directory else FileLock.on(os.devnull)
        except (OSError, ForeignLock) as error:
            self.error = error

    def start(self) -> bool:
        """Start it, unless an earlier one holds the lock. Whether there is nothing left to start."""
        if self._lock is None:
            return True
        try:
            self._is_locked = self._is_locked or self._lock.take(patience=0)
            if self._is_locked:
                self._fork(self._lock)
        except OSError as error:
            self.error = error
            return True
        return self._is_locked

    def _fork(self, lock: FileLock) -> None:
        began = time.monotonic()
        self.until = began + self._patience
        _sign(lock, began, self.errand.note((), False))
        self.reading, writing = os.pipe()
        try:
            self.pid = os.fork()
            if self.pid == 0:
                try:
                    self.errand.act(_begin(writing, lock.handle))
                finally:
                    os._exit(0)
        finally:
            os.close(writing)

    def read(self) -> None:
        """Take what it says now."""
        part = os.read(self.reading, 1 << 16)
        self._text += part
        self.ended = not part

    def read_rest(self) -> None:
        """Take what it has said already: this process may have been stopped until patience was over."""
        os.set_blocking(self.reading, False)
        with contextlib.suppress(BlockingIOError):
            while not self.ended and len(self._text) < _LONGEST:
                self.read()

    def close(self) -> Union[Outcome, OSError, ForeignLock]:
        """End it; what came of it. The lock is free from now on, unless nothing can end it."""
        if self._outcome is None:
            try:
                self._outcome = self._closed()
            except OSError as error:
                self._outcome = error
        return self._outcome

    def _closed(self) -> Union[Outcome, OSError, ForeignLock]:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        if self.reading >= 0:
            os.close(self.reading)
        if self._lock is None:
            return self.error or OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        with self._lock as lock:
            if self.error is not None:
                return self.error
            if not self.pid:
                return _earlier(lock)
            try:
                messages = [json.loads(line) for line in self._text.split(b"\n")[:-1]]
            except ValueError:
                return OSError(errno.EBADMSG, os.strerror(errno.EBADMSG))
            _sign(lock, self.until - self._patience, self.errand.note(messages, self.ended))
            return Outcome(messages, self.ended)


def _attend(children: Sequence[_Child], patience: float) -> None:
    """Start each, as soon as no other call is at its errand, and hear them until they end, or patience does.

    A call beside this one ends within its own patience.
    """
    last = time.monotonic() + patience
    waiting, running = list(children), list[_Child]()
    while waiting or running:
        now = time.monotonic()
        started = [each for each in waiting if each.start()]
        running += [each for each in started if each.pid]
        late = [each for each in running if now >= each.until and not each.ended]
        for each in late:
            each.read_rest()
        over = [each for each in running if each.ended or each in late]
        for each in over:
            # Now: another call may be at the errand of one that answered, while others here hang.
            each.close()
        running = [each for each in running if each not in over]
        waiting = [each for each in waiting if each not in started] if now < last else []
        if not waiting and not running:
            return
        nearest = min([each.until for each in running] + [min(last, now + _PAUSE)] * bool(waiting))
        poller = select.poll()
        by_handle = {each.reading: each for each in running}
        for handle in by_handle:
            poller.register(handle, select.POLLIN | select.POLLHUP)
        for handle, _ in poller.poll(max(0.0, nearest - now) * 1000):
            by_handle[handle].read()


def _sign(lock: FileLock, began: float, note: Mapping[str, Any]) -> None:
    """For the next call, if the child hangs still."""
    if stat.S_ISREG(os.fstat(lock.handle).st_mode):
        lock.sign(json.dumps({**note, "began": began}))


def _earlier(lock: FileLock) -> Outcome:
    try:
        note = dict(json.loads(lock.note()))
        return Outcome((), False, max(0.0, time.monotonic() - float(note["began"])), note)
    except (ValueError, TypeError, KeyError):
        return Outcome((), False, 0.0)


def _begin(writing: int, lock: int) -> Say:
    """The child's beginning. It keeps nothing of its parent that somebody could wait for."""
    os.setsid()
    os.chdir("/")
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_DFL)
    kept = [fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, 3) for handle in (writing, lock)]
    null = os.open(os.devnull, os.O_RDWR)
    for handle in range(3):
        os.dup2(null, handle)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))

    def say(**message: Any) -> None:
        # Whoever asked may be gone. What was begun here is finished and removed all the same.
        with contextlib.suppress(OSError):
            os.write(kept[0], json.dumps(message).encode("ascii") + b"\n")

    return say


def _reap(children: Sequence[int]) -> None:
    """Reap them. One that nothing can end is left: it holds its lock, and init reaps it."""
    left = set(children)

    def reaped() -> bool:
        for child in list(left):
            try:
                if os.waitpid(child, os.WNOHANG) != (0, 0):
                    left.remove(child)
            except ChildProcessError:
                left.remove(child)
        return not left

    wait_for(reaped, _REAP_SECONDS, 0.01)
