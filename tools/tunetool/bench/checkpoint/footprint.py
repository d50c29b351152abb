"""CPU seconds and peak memory of a process and its descendants, from /proc."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from dataclasses import dataclass
from pathlib import Path

_KIB = 1024
_RESET_PEAK = "5"
"""Value for /proc/PID/clear_refs that resets VmHWM to the present memory (proc(5))."""


@dataclass(frozen=True)
class Footprint:
    """A process and its descendants at one moment."""

    cpu_seconds: float
    """User and system time in seconds, including children that have ended."""
    resident_bytes: int
    peak_bytes: int | None
    """Sum of each process's most since ``reset_peaks``: an upper bound, since peaks need not fall together. None where
    the kernel does not tell it.
    """


def footprint() -> Footprint:
    """CPU time and memory of this process and its descendants. Shared memory counts once for each."""
    usage, reaped = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = usage.ru_utime + usage.ru_stime + reaped.ru_utime + reaped.ru_stime
    resident, peak = 0, 0 if "VmHWM" in _status(os.getpid()) else None
    for pid in (os.getpid(), *descendants(os.getpid())):
        # One that ended meanwhile is among the reaped, or holds nothing.
        with contextlib.suppress(OSError, ValueError, KeyError):
            held = _status(pid)
            resident += held["VmRSS"]
            if peak is not None:
                peak += held["VmHWM"]
            if pid != os.getpid():
                spent += _cpu_seconds(pid)
    return Footprint(spent, resident, peak)


def reset_peaks() -> bool:
    """Reset ``peak_bytes``. Returns False if the kernel cannot do that."""
    trim()
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK)
    return True


def trim() -> None:
    """Give back to the kernel what this process has freed: kept by the allocator, it would hide what comes next."""
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def descendants(pid: int) -> list[int]:
    """Pids of the children of all threads, and of their children."""
    pids: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children = [int(text) for text in task.read_text().split()]
                pids += children
                waiting += children
    return pids


def _status(pid: int) -> dict[str, int]:
    sizes = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            sizes[name] = int(rest.split()[0]) * _KIB
    return sizes


def _cpu_seconds(pid: int) -> float:
    # Fields 14 and 15 of /proc/PID/stat; the name in field 2 may hold blanks and parentheses itself.
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
