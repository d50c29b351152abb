"""Kills or stops this process at a chosen point of its work: before the n-th change of a file system.

A test lets the work run once to learn its points, then once for each point of interest. What is on the disk at that
moment depends on the point only, never on speed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_RANDOM = re.compile(r"[0-9a-f]{8,}")
_AUDITED = {"os.rename": (1, 3), "os.remove": (0, 1), "os.mkdir": (0, 2), "os.rmdir": (0, 1)}
"""Events of Python itself; which of their arguments names what is changed, and which the directory where a relative
name begins. See sys.addaudithook."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def install(
    under: Path, log: Path, at: int | str | None = None, number: int = signal.SIGKILL, process: int | None = None
) -> Callable[[str, str], None]:
    """From now on each change below ``under`` is noted in ``log``, one line before it is done. At the line ``at`` (by
    its number from 0, or the first with that beginning) the process sends itself the signal ``number``. Of a write that
    it is killed at, the first half is done.

    ``process`` is signalled instead of this one, by the first that reaches the line with this ``log``: for a program
    whose children do the work. The others go on.

    Returns what notes, and ends, a change that Python does not see: it is given the call and the path.
    """
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    lock, count = threading.Lock(), 0
    inside, pending = str(under), [at]

    def reach(call: str, path: str, half: Callable[[], object] = lambda: None) -> None:
        nonlocal count
        if not path.startswith(inside):
            return
        with lock:  # held at the end: no other thread notes a change that comes after
            line = f"{call} {_RANDOM.sub('*', path[len(inside) :])}"
            os.write(handle, f"{line}\n".encode())
            if pending and (line.startswith(at) if isinstance(at, str) else count == at):
                pending.clear()
                if process is None and number == signal.SIGKILL:
                    # The write itself may be refused: one that asks which alignment the drive accepts.
                    with contextlib.suppress(OSError):
                        half()
                _send(number, process, log)
            count += 1

    def audited(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _AUDITED:
            path, directory = (arguments[index] for index in _AUDITED[event])
            begin = named(directory) + "/" if directory != -1 else ""
            folder, name = os.path.split(begin + os.fsdecode(path))
            if folder.startswith("/proc/self/fd/"):
                folder = str(Path(folder).readlink())
            reach(event.removeprefix("os."), f"{folder}/{name}")
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
    return reach


def _send(number: int, process: int | None, log: Path) -> None:
    if process is None:
        os.kill(os.getpid(), number)
        return
    try:
        os.close(os.open(f"{log}.reached", os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return
    os.kill(process, number)


def points(log: Path) -> list[str]:
    """The log of a run: ``CALL PATH``, with the path relative to ``under`` and without its random parts."""
    return log.read_text().splitlines() if log.exists() else []


def telling(noted: list[str]) -> list[int]:
    """Points that differ in what they leave: the first, the middle and the last change of each kind.

    Files without a name leave nothing.
    """
    kinds: dict[str, list[int]] = {}
    for number, line in enumerate(noted):
        if not line.endswith("(deleted)") and line != "open ":
            kinds.setdefault(re.sub(r"\d+", "#", line), []).append(number)
    return sorted({each for group in kinds.values() for each in (group[0], group[len(group) // 2], group[-1])})
