"""Ends this process by SIGKILL at a point of its work that a test chooses: before the n-th change of a file system.

A test lets the work run once to learn its points, then once for each point of interest. What is on the disk at that
moment follows from the point alone, and never from how fast anything was.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_RANDOM = re.compile(r"[0-9a-f]{8,}")
_AUDITED = {"os.rename": 1, "os.remove": 0, "os.mkdir": 0, "os.rmdir": 0}
"""Events of Python itself, and which of their arguments names what is changed. See sys.addaudithook."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def install(under: Path, log: Path, at: int | None = None) -> None:
    """From now on each change below ``under`` is noted in ``log``, one line before it is done; no change follows the
    line ``at`` (from 0), since the process ends there. Of a write that it ends at, the first half is done.
    """
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    lock, count = threading.Lock(), 0
    inside = str(under)

    def reach(call: str, path: str, half: Callable[[], object] = lambda: None) -> None:
        nonlocal count
        if not path.startswith(inside):
            return
        with lock:  # held at the end: no other thread notes a change that comes after
            os.write(handle, f"{call} {_RANDOM.sub('*', path[len(inside) :])}\n".encode())
            if count == at:
                half()
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    def audited(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _AUDITED:
            reach(event.removeprefix("os."), os.fsdecode(arguments[_AUDITED[event]]))
        elif event == "open" and isinstance(arguments[0], (str, bytes)) and (arguments[2] or 0) & _WRITES:
            reach("open", os.fsdecode(arguments[0]))

    sys.addaudithook(audited)
    # Python has no events for these two.
    pwrite, fsync = os.pwrite, os.fsync

    def named(number: int) -> str:
        return str(Path(f"/proc/self/fd/{number}").readlink())

    def writing(to: int, data: Any, offset: int) -> int:
        half = data[: len(data) // 2 // 4096 * 4096]
        reach("pwrite", named(to), lambda: half and pwrite(to, half, offset))
        return pwrite(to, data, offset)

    def syncing(what: Any) -> None:
        reach("fsync", named(what if isinstance(what, int) else what.fileno()))
        fsync(what)

    os.pwrite, os.fsync = writing, syncing  # type: ignore[assignment]


def points(log: Path) -> list[str]:
    """What a run noted: ``CALL PATH``, the path below where it looked and without what is random in it."""
    return log.read_text().splitlines() if log.exists() else []


def telling(noted: list[str]) -> list[int]:
    """Points that differ in what they leave: of changes alike that follow one another, the first, middle and last.

    What is opened or written without a name leaves nothing.
    """
    groups: list[tuple[str, list[int]]] = []
    for number, line in enumerate(noted):
        if (line.startswith("open ") and line.endswith(" ")) or line.endswith("(deleted)"):
            continue
        kind = re.sub(r"\d+", "#", line)
        if not groups or groups[-1][0] != kind:
            groups.append((kind, []))
        groups[-1][1].append(number)
    return sorted({each for _, group in groups for each in (group[0], group[len(group) // 2], group[-1])})
