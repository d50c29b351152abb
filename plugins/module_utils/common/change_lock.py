"""The node's lock: one change at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import Iterator

LOCK_PATH = "/run/tunetool.lock"
_held: list[int] = []


class Locked(Exception):
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
