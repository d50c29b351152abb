"""A child process that this process outlives: for whatever may wait for ever.

Nothing ends a process that waits for a dead drive, a frozen file system or a server that is gone, SIGKILL neither. So a
child does what may, nobody waits for it longer than a limit, and while it hangs there is no second one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import stat
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Sequence

from .file_lock import FileLock
from .files import make_run_directory
from .waiting import wait_for

_REAP_SECONDS = 1.0
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


def in_a_child(
    act: Callable[[Say], None],
    name: str,
    patience: float,
    note: Callable[[Messages, bool], Mapping[str, Any]] = lambda messages, ended: {},
    directory: str | None = None,
) -> Outcome:
    """Let a child do ``act``, and take what it says within ``patience`` seconds. Raises ``OSError``, ``ForeignLock``.

    ``name``: of what there is no second one of. ``note``: of the messages and whether the child ended, what the next
    call gets if it hangs still. ``directory``: of the lock; None: that of this user, who may have none.
    """
    if directory is None:
        directory = make_run_directory() if os.geteuid() == 0 else os.environ.get("XDG_RUNTIME_DIR")
    if not directory:
        lock = FileLock.on(os.devnull)
    else:
        lock = FileLock.our_file(os.path.join(directory, "%s.lock" % re.sub(r"[^A-Za-z0-9]+", "-", name)))
    with lock:
        # A call beside this one ends within its own patience.
        if directory and not lock.take(patience=patience, pause=0.05):
            return _earlier(lock)
        began = time.monotonic()
        _sign(lock, began, note((), False))
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                act(_begin(writing, lock.handle))
            finally:
                os._exit(0)
        os.close(writing)
        try:
            messages, ended = _listen(reading, began + patience)
        finally:
            os.close(reading)
            _end(child)
        _sign(lock, began, note(messages, ended))
        return Outcome(messages, ended)


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


def _listen(reading: int, deadline: float) -> tuple[list[dict[str, Any]], bool]:
    """The messages until the child ends, or until ``deadline``; and whether it ended."""
    poller = select.poll()
    poller.register(reading, select.POLLIN | select.POLLHUP)
    text, ended = b"", False
    while not ended:
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(left * 1000):
            break
        part = os.read(reading, 1 << 16)
        text += part
        ended = not part
    return [json.loads(line) for line in text.split(b"\n")[:-1]], ended


def _end(child: int) -> None:
    """End the child. One that nothing can end is left: it holds its lock, and init reaps it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        wait_for(lambda: os.waitpid(child, os.WNOHANG) != (0, 0), _REAP_SECONDS, 0.01)
