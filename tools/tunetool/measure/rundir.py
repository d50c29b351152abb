"""The directory of a run inside the target: made, marked with its owner, and removed afterwards in any case."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tunetool.ctrl_c import CtrlC
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure.janitor import Janitor

PREFIX = ".tunetool-"
_OWNER = "owner.json"
_UNMARKED_GRACE = 3600.0
"""Seconds for which a directory without its mark may still be one that is just being made."""


@contextlib.contextmanager
def run_directory(target: Path, run_id: str, left_behind: Callable[[str], None] | None = None) -> Iterator[Path]:
    """``target/.tunetool-<id>``, mode 0700, gone afterwards, after SIGKILL too.

    Raises ``UsageProblem`` when it cannot be made. ``left_behind`` is called if a broken storage keeps the directory;
    without it ``OSError`` is raised.
    """
    path, made = target / (PREFIX + run_id[:12]), False
    # Around all: a kill comes just as well while the directory is made, or removed.
    with Janitor(str(path)) as janitor:
        try:
            try:
                path.mkdir(mode=0o700)
                made = True
                janitor.note({"kind": "directory", "path": str(path)})
                (path / _OWNER).write_text(json.dumps(process_identity(os.getpid())))
            except OSError as error:
                if error.errno == errno.EIO:
                    raise CannotJudge(f"`{target}` cannot be written: {error.strerror}", "see `dmesg | tail`") from None
                raise UsageProblem(
                    f"`{target}` is not writable: {error.strerror}",
                    "run as a user who may write there, or choose another `--target`",
                ) from None
            yield path
        finally:
            try:
                # What was there before, a directory or a link of somebody else, is not ours to remove.
                if made:
                    _remove(path)
            except OSError as error:
                # What went wrong before this is worth more than that it could not be tidied up.
                if left_behind is None:
                    raise
                left_behind(f"`{path}` could not be removed: {error.strerror}; the next run removes it")
            finally:
                # Either there is nothing left, or this storage keeps it.
                with contextlib.suppress(OSError):
                    janitor.note()


def stale_directories(target: Path) -> list[Path]:
    """Directories here that runs of this host and user left behind when they died."""
    stale = []
    for path in sorted(target.glob(PREFIX + "*")):
        with contextlib.suppress(OSError, ValueError):
            if path.is_symlink() or path.lstat().st_uid != os.geteuid():
                continue
            if _is_dead(path):
                stale.append(path)
    return stale


def remove_stale(paths: Sequence[Path]) -> None:
    """Delete what ``stale_directories`` found."""
    for path in paths:
        _remove(path)


def process_identity(pid: int) -> dict[str, object]:
    """``host``, ``boot``, ``pid`` and ``start``: no other process ever has the same.

    Raises ``OSError`` when there is no such process.
    """
    # A pid alone comes back after a reboot or a few days: with boot and start time it is one process.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"host": socket.gethostname(), "boot": boot, "pid": pid, "start": _start_ticks(pid)}


def _start_ticks(pid: int) -> int:
    # Field 22 of /proc/PID/stat; the name in field 2 may hold blanks and parentheses itself.
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return int(text.rpartition(")")[2].split()[19])


def _is_dead(path: Path) -> bool:
    try:
        owner = json.loads((path / _OWNER).read_text())
        pid = int(owner["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return time.time() - path.stat().st_mtime > _UNMARKED_GRACE
    if owner.get("host") != socket.gethostname():
        return False
    try:
        return bool(owner != process_identity(pid))
    except OSError:
        return True


def _remove(path: Path) -> None:
    # A second Ctrl-C while files of many GB are unlinked must not leave the rest.
    ctrl_c = CtrlC()
    for _ in range(3):
        with ctrl_c.held():
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path, ignore_errors=False)
            break
    ctrl_c.deliver()


@contextmanager
def temporary() -> Iterator[Path]:
    """A directory of this run for the ranks' output; removed afterwards, after SIGKILL too."""
    with (
        tempfile.TemporaryDirectory(prefix="tunetool-", ignore_cleanup_errors=True) as name,
        Janitor(name) as janitor,
    ):
        janitor.note({"kind": "directory", "path": name})
        try:
            yield Path(name)
        finally:
            # Here, where a kill leaves nothing either.
            shutil.rmtree(name, ignore_errors=True)
