"""Undoes what a program made once that program is gone, however it ended: tunetool cleans up after itself, whatever
happens to it but SIGKILL, and this is for that.

Self-contained: ``Janitor`` runs this file as a program of its own, which must not die with its parent.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Entry = Mapping[str, Any]
"""Something that was made: its ``kind``, which says how it is undone, and what that must know."""
_TRIES, _PAUSE = 60, 0.5
_PATIENCE = 30.0
"""Seconds for which a program waits at its own end until all is undone."""


class Janitor:
    """A process that undoes, the newest first, what is noted here, once this process is gone or this context ends.

    ``what``: shown to people who list processes. ``module``: has a table ``REMOVALS`` of further kinds, as below.
    ``sure``: how often in a row there must be nothing left to undo, where a program that this one has started may still
    be at work and make what was not there a moment ago.
    """

    def __init__(self, what: str, module: str = "", sure: int = 1) -> None:
        # Without a module it needs nothing but Python itself, and so starts in a few milliseconds.
        alone = [] if module else ["-I", "-S"]
        self._argv = [sys.executable, *alone, __file__, what, module, str(sure)]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Janitor:
        self._process = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def note(self, *entries: Entry) -> None:
        """All that there is to undo from now on, in the order in which it was made. Raises ``OSError`` where the other
        process has ended, or was not started."""
        if self._process is None or (pipe := self._process.stdin) is None:
            raise BrokenPipeError("the janitor does not run")
        pipe.write(json.dumps(entries).encode() + b"\n")
        # Whoever is killed flushes nothing.
        pipe.flush()

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]  # a pipe, as asked for above
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)


def _remove_directory(entry: Entry) -> None:
    # What the dead program started dies with it, but a write that the kernel still works on ends only then.
    path = Path(entry["path"])
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        raise OSError(f"`{path}` is still there")


def _write_value(entry: Entry) -> None:
    path = Path(entry["path"])
    if path.read_text().strip() != entry["value"]:
        path.write_text(f"{entry['value']}\n")


REMOVALS: Mapping[str, Callable[[Any], None]] = {"directory": _remove_directory, "value": _write_value}
"""How each kind is undone; what raises is tried again."""


def last_list(lines: Iterable[bytes]) -> list[Entry]:
    """The last whole line; a kill may have cut off the one after it."""
    entries: list[Entry] = []
    for line in lines:
        if line.endswith(b"\n"):
            entries = json.loads(line)
    return entries


def sweep(entries: list[Entry], removals: Mapping[str, Callable[[Any], None]], sure: int = 1) -> None:
    """Undo them, the newest first, until there is nothing to do ``sure`` times in a row."""
    clean = 0
    for _ in range(_TRIES if entries else 0):
        # All of them each time, also after a problem.
        problems = [_fails(removals[entry["kind"]], entry) for entry in reversed(entries)]
        clean = 0 if any(problems) else clean + 1
        if clean == sure:
            return
        time.sleep(_PAUSE)


def _fails(remove: Callable[[Any], None], entry: Entry) -> bool:
    try:
        remove(entry)
    except Exception:
        return True
    return False


def _main(module: str, sure: int) -> None:
    # Beside this file lies a `statistics.py`, which must not stand in for Python's own.
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]  # noqa: PTH100, PTH120
    if module:
        # This very tunetool, also where only its parent's path leads to it.
        sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # noqa: PTH100, PTH120
    more = importlib.import_module(module).REMOVALS if module else {}
    sweep(last_list(sys.stdin.buffer), {**REMOVALS, **more}, sure)


if __name__ == "__main__":
    _main(sys.argv[2], int(sys.argv[3]))
