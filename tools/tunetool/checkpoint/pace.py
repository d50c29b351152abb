"""Keeps a drain from slowing down training: a rate limit, and a pause while a checkpoint is saved."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunetool.checkpoint.saver_lock import HELD, TOUCH_EVERY, Holder
from tunetool.checkpoint.saver_lock import NAME as SAVE_LOCK
from tunetool.node.common.file_lock import FileLock

FLAG = ".tunetool-saving"
_SILENT = 3 * TOUCH_EVERY
_CLOCK_STEP = 5.0
"""Seconds by which the time of a lock may be in the future, since clocks are slewed."""
PAUSE_AT_MOST = 600.0
"""Seconds that a drain waits for one save at most."""
_POLL_SECONDS = 0.01
"""Seconds between two checks while a save runs."""

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""Numbers of the system call (linux: arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h)."""
_WHO_PROCESS, _CLASS_IDLE = 1, 3 << 13
_NICE = 10
"""Leaves a tenth of a busy core. At 19 a drain makes no progress on a node whose data loaders use every core."""


@contextlib.contextmanager
def saving(scratch: Path, *, make: bool = True) -> Iterator[None]:
    """Pause the drains that read from ``scratch``. Any number of ranks may hold this at the same time.

    It is a kernel lock on a file in ``scratch``, so it ends with the process. The file is created if ``make`` is set;
    otherwise the lock is taken only if a drain has created the file. If the lock fails, the save continues without it.

    Use it around ``dcp.save`` with any writer except `DirectWriter`, which does it by itself:
    ``with saving(Path("/mnt/nvme_raid0/ckpt")): dcp.save(...)``.
    """
    lock = None
    with contextlib.suppress(OSError):
        lock = FileLock.file(scratch / FLAG, make=make)
        HELD.add(lock.handle)
        lock.take(shared=True)
    try:
        yield
    finally:
        if lock is not None and lock.handle in HELD:
            HELD.discard(lock.handle)
            # Unlock explicitly: a child that a library forked past Python shares the lock, and would keep it after a
            # mere close.
            with contextlib.suppress(OSError):
                lock.free()
            lock.close()


@dataclass(frozen=True)
class RunningSave:
    """A running save, as far as its lock file describes it. ``key`` distinguishes one save from the next."""

    key: tuple[object, ...]
    file: Path
    who: str
    silent: float | None = None
    """Seconds since the last sign of life in the file; None if the file gives none."""

    def __str__(self) -> str:
        sign = "" if self.silent is None else f", last sign of life {max(self.silent, 0.0):.0f} s ago"
        return f"`{self.file}`: {self.who}{sign}"


def savers(scratch: Path) -> list[RunningSave]:
    """The running saves in ``scratch``: ``saving`` is held, or DirectWriter writes to a directory below it."""
    running = []
    with contextlib.suppress(OSError), FileLock.file(scratch / FLAG, make=False) as lock:
        if not lock.take(patience=0):
            running.append(RunningSave((FLAG,), scratch / FLAG, _lockers(lock.handle)))
    with contextlib.suppress(OSError):
        running += filter(None, map(_locked_by, scratch.glob(f"*/{SAVE_LOCK}")))
    return running


def _locked_by(path: Path) -> RunningSave | None:
    """The running save that holds this lock file; None if its process is dead, or it writes nothing yet.

    A save is locked before its ranks meet. One of them may come only once its drain or replica is done, which must not
    wait for that save.
    """
    # Check its age and process, not the kernel lock: an attempt to take it could make the saver believe that another
    # process holds it.
    with contextlib.suppress(OSError):
        status = path.stat()
        silent = time.time() - status.st_mtime
        if not -_CLOCK_STEP <= silent < _SILENT:
            return None
        holder = Holder.parse(path.read_text(encoding="utf-8", errors="replace"))
        if holder is None or not holder.tokens or holder.is_gone(Holder.this_process()):
            return None
        save = holder.tokens[-1]
        if any(file.name.endswith(f".{save}.distcp") for file in path.parent.iterdir()):
            return RunningSave((path, status.st_ino, save), path, str(holder), silent)
    return None


def _lockers(handle: int) -> str:
    """The processes that hold a kernel lock on the file, as text, as far as /proc/locks shows them."""
    status = os.fstat(handle)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    pids: set[str] = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text(encoding="ascii", errors="replace").splitlines():
            fields = line.split()
            # `1: FLOCK  ADVISORY  READ 4242 fd:00:1234 0 EOF`; one that waits has an arrow before FLOCK
            if len(fields) == 8 and fields[1] == "FLOCK" and fields[5] == device:
                pids.add(fields[4])
    if not pids:
        return "a process"
    return f"process{'es' if len(pids) > 1 else ''} {', '.join(sorted(pids, key=int))} on `{os.uname().nodename}`"


class Pace:
    """Limits the rate of a drain and pauses it during saves."""

    def __init__(
        self,
        scratch: Path,
        rate: float | None,
        tick: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        saves: Callable[[Path], Sequence[RunningSave]] = savers,
        say: Callable[[str], object] = lambda line: sys.stderr.write(f"{line}\n"),
        limit: float = PAUSE_AT_MOST,
    ) -> None:
        """``rate``: bytes per second, None for no limit; ``tick`` is called repeatedly, also while waiting.

        ``limit``: longest wait for one save, in seconds. After that, ``say`` gets a message that names the save, and
        the drain continues: a checkpoint that never leaves the node is worse than a slower save.
        """
        self._scratch, self._rate, self._saves = scratch, rate, saves
        self._tick, self._clock, self._sleep, self._say, self._limit = tick, clock, sleep, say, limit
        self._free_at = clock()
        self._since: dict[tuple[object, ...], float] = {}
        self._ignored: set[tuple[object, ...]] = set()

    def wait(self, count: int) -> None:
        """Wait until ``count`` more bytes may be copied. Unused bandwidth is not saved up for a burst."""
        self._tick()
        while self.must_wait():
            self._sleep(_POLL_SECONDS)
            self._tick()
        if self._rate is None:
            return
        while (remaining := self._free_at - self._clock()) > 0:
            self._sleep(min(remaining, 0.5))
            self._tick()
        self._free_at = max(self._free_at, self._clock()) + count / self._rate

    def must_wait(self) -> bool:
        """Whether a save runs for which this still waits."""
        running = {saver.key: saver for saver in self._saves(self._scratch)}
        now = self._clock()
        self._since = {key: self._since.get(key, now) for key in running}
        self._ignored &= running.keys()
        for key, since in self._since.items():
            if key not in self._ignored and now - since >= self._limit:
                self._ignored.add(key)
                self._say(
                    f"a drain has waited {self._limit:g} s for a save and now continues beside it: {running[key]}"
                )
        return bool(running.keys() - self._ignored)


def yield_to_training() -> None:
    """Lower the priority of this process on the CPU and, if the I/O scheduler supports priorities, on the drives."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    # A new session is a new scheduling group with a weight of its own (sched(7), autogroup).
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICE))
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).syscall(number, _WHO_PROCESS, 0, _CLASS_IDLE)
