"""Tests that look for the users of a drive, beside one that shows nobody what it has open.

A process whose ring of io_uring hides its files may have any drive of the machine open, so every drive is refused while
it lives: the drives of other tests, which run at the same time in other groups, as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(f"/tmp/tunetool-tests-{os.getuid()}")
"""Of the machine, as the processes are: not below TMPDIR, which each group may have for itself."""


@contextlib.contextmanager
def nobody_hides() -> Iterator[None]:
    """While no test hides what it has open."""
    with _open("files") as files:
        # Whoever waits to be alone keeps the gate: others do not come before it again and again.
        with _open("gate") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(files, fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def hidden_from_others() -> Iterator[None]:
    """While no other test looks for the users of its drives."""
    with _open("gate") as gate, _open("files") as files:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(files, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _open(name: str) -> Iterator[int]:
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    # Not inherited: what a test leaves running must not keep the lock.
    handle = os.open(FOLDER / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield handle
    finally:
        os.close(handle)
