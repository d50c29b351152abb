"""How a drain stays out of training's way: not faster than allowed, and not at all while a checkpoint is saved."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

FLAG = ".tunetool-saving"
SAVE_LOCK = ".tunetool-save.lock"
"""The coordinator's lock in a directory that is saved to; touched every 20 s (checkpoint/lock.py)."""
_SILENT = 60.0
_LOOK = 0.01
"""Seconds between two looks while a save runs."""

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""Numbers of the system call (linux: arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h)."""
_WHO_PROCESS, _CLASS_IDLE = 1, 3 << 13
_NICE = 10
"""A tenth of a busy core. At 19 a drain stands still on a node whose loaders take every core."""


@contextlib.contextmanager
def saving(scratch: Path, *, make: bool = True) -> Iterator[None]:
    """While this is held, drains out of ``scratch`` pause. Any number of ranks may hold it.

    A kernel lock on a file that is made there, so it ends with its process; without ``make`` only where a drain has
    made it. Where it cannot be had the save goes on without.

    Around ``dcp.save`` with any writer but `DirectWriter`, which does it itself:
    ``with saving(Path("/mnt/nvme_raid0/ckpt")): dcp.save(...)``.
    """
    handle = None
    with contextlib.suppress(OSError):
        handle = os.open(scratch / FLAG, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if make else 0), 0o666)
        fcntl.flock(handle, fcntl.LOCK_SH)
    try:
        yield
    finally:
        if handle is not None:
            # Said aloud: a child forked meanwhile holds the same lock, and closing alone would leave it to that one.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)


def is_saving(scratch: Path) -> bool:
    """Whether a save runs there: ``saving`` is held, or a directory of it is locked by a writer of ours."""
    with contextlib.suppress(OSError):
        handle = os.open(scratch / FLAG, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
    with contextlib.suppress(OSError):
        for lock in scratch.glob(f"*/{SAVE_LOCK}"):
            # Its age, not the kernel's lock: to try that one could make the saver believe that another one holds it.
            with contextlib.suppress(OSError):
                if time.time() - lock.stat().st_mtime < _SILENT:
                    return True
    return False


class Pace:
    """Says when the next piece may be moved."""

    def __init__(
        self,
        scratch: Path,
        rate: float | None,
        tick: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        busy: Callable[[Path], bool] = is_saving,
    ) -> None:
        """``rate`` in bytes per second, None for no limit; ``tick`` is called now and then, also while it waits."""
        self._scratch, self._rate, self._busy = scratch, rate, busy
        self._tick, self._clock, self._sleep = tick, clock, sleep
        self._free_at = clock()

    def wait(self, count: int) -> None:
        """Return when ``count`` more bytes may be moved. What was not used is not saved up for a burst."""
        self._tick()
        while self._busy(self._scratch):
            self._sleep(_LOOK)
            self._tick()
        if self._rate is None:
            return
        while (left := self._free_at - self._clock()) > 0:
            self._sleep(min(left, 0.5))
            self._tick()
        self._free_at = max(self._free_at, self._clock()) + count / self._rate


def yield_to_training() -> None:
    """Give way to everybody else, on the CPU and, where the I/O scheduler knows priorities, on the drives."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    # A session of its own is a scheduling group of its own, whose weight is set apart (sched(7), autogroup).
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICE))
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).syscall(number, _WHO_PROCESS, 0, _CLASS_IDLE)
