"""Processes known by a mark in their environment, which children inherit, even those in sessions of their own.

Run by path, ``marked.py NAME VALUE`` ends them once its standard input does: for when whoever started them is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_PATIENCE = 10.0


def marked(name: str, value: str) -> list[int]:
    """This user's processes whose environment has ``name=value``, without this one."""
    wanted = f"{name}={value}".encode()
    found = []
    for entry in os.listdir("/proc"):  # noqa: PTH208  (thousands of names, of which a Path each is too much)
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found.append(int(entry))
        except OSError:
            continue  # gone, or another user's
    return found


def end_marked(name: str, value: str, spare: Callable[[int], bool] = lambda _: False) -> list[int]:
    """Kill them all, and what they started meanwhile. Those that are still there, stuck in the kernel."""
    deadline = time.monotonic() + _PATIENCE
    while left := [pid for pid in marked(name, value) if not spare(pid)]:
        if time.monotonic() > deadline:
            return left
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return []


@contextlib.contextmanager
def swept_away(name: str, value: str) -> Iterator[None]:
    """What is started inside with ``name=value`` is gone afterwards, even when this process is killed outright."""
    with subprocess.Popen(
        [sys.executable, __file__, name, value], stdin=subprocess.PIPE, start_new_session=True
    ) as sweeper:
        assert sweeper.stdin is not None  # noqa: S101  (a pipe, as asked for above)
        try:
            yield
        finally:
            sweeper.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                sweeper.wait(2 * _PATIENCE)


def _shared(pid: int) -> bool:
    """ssh's master of a shared connection, which others of this user may have joined; it ends by itself."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0 ").endswith(b"[mux]")
    except OSError:
        return False


if __name__ == "__main__":
    while os.read(0, 4096):
        pass
    end_marked(sys.argv[1], sys.argv[2], _shared)
