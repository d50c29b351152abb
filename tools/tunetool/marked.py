"""Processes known by a mark in their environment, which children inherit, even those in sessions of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
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
