"""The node's lock: one change at a time."""

from __future__ import annotations

import contextlib
import os
from typing import Iterator

from .file_lock import FileLock
from .refusal import Expected

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
