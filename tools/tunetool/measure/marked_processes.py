"""Processes known by a mark in their environment, which children inherit, even those in sessions of their own."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from tunetool.measure.janitor import Entry, Janitor
from tunetool.node.common.waiting import wait_for

_PATIENCE = 10.0


def marked(name: str, value: str) -> list[int]:
    """This user's processes whose environment has ``name=value``, without this one."""
    return [pid for pid in _other_pids() if has_mark(pid, name, value)]


def has_mark(pid: int, name: str, value: str) -> bool:
    """False for one that is gone, a zombie, or another user's."""
    return f"{name}={value}".encode() in _strings(pid, "environ")


def naming(argument: str) -> list[int]:
    """This user's processes that have ``argument`` in their command line, or in a shell's, without this one."""
    wanted = argument.encode()
    mine = os.getuid()
    return [
        pid for pid in _other_pids() if _owner(pid) == mine and any(wanted in each for each in _strings(pid, "cmdline"))
    ]


def end_marked(name: str, value: str, spare: Callable[[int], bool] = lambda _: False) -> list[int]:
    """Kill them all, and what they started meanwhile. Those that are still there, stuck in the kernel."""
    return end_all(lambda: [pid for pid in marked(name, value) if not spare(pid)])


def end_all(find: Callable[[], list[int]]) -> list[int]:
    """Kill what ``find`` finds, until it finds nothing. Those that are still there, stuck in the kernel."""
    left: list[int] = []

    def are_gone() -> bool:
        left[:] = find()
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return not left

    wait_for(are_gone, _PATIENCE, 0.05)
    return left


@contextlib.contextmanager
def swept_away(name: str, value: str, *directories: str | Path) -> Iterator[None]:
    """What is started inside with ``name=value`` is gone afterwards, and the ``directories`` with all that is in them,
    even when this process is killed outright."""
    folders = [{"kind": "directory", "path": str(path)} for path in directories]
    with Janitor(f"{name}={value}", __name__) as janitor:
        janitor.note(*folders, {"kind": "processes", "name": name, "value": value})
        yield


def _other_pids() -> list[int]:
    names = os.listdir("/proc")  # noqa: PTH208  (thousands, of which a Path each is too much)
    return [int(name) for name in names if name.isdigit() and int(name) != os.getpid()]


def _strings(pid: int, file: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0")
    except OSError:
        return []  # gone, or another user's


def _owner(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def _shared(pid: int) -> bool:
    """ssh's master of a shared connection, which others of this user may have joined; it ends by itself."""
    return any(each.rstrip().endswith(b"[mux]") for each in _strings(pid, "cmdline"))


def _end_started(entry: Entry) -> None:
    end_marked(entry["name"], entry["value"], _shared)


REMOVALS = {"processes": _end_started}
"""For the janitor."""
