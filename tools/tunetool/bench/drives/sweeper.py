"""Takes down what a run made of drives once that run is gone, its stdin a pipe with all that is made, a list a line.

It must not die with the run: it has a session of its own. A run that ended well left an empty list, or what it could
not take down.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable

from tunetool.bench.drives.made import Entry, undone

_TRIES, _ENOUGH, _PAUSE = 60, 2, 0.5


def last_list(lines: Iterable[bytes]) -> list[Entry]:
    """The last whole line; a kill may have cut off the one after it."""
    entries: list[Entry] = []
    for line in lines:
        if line.endswith(b"\n"):
            entries = json.loads(line)
    return entries


def sweep(entries: list[Entry]) -> None:
    """Take them down, the newest first, until nothing is there twice in a row.

    A program that the run had started, such as mount, may still be at work and make what was not there a moment ago.
    """
    clean = 0
    for _ in range(_TRIES):
        # All of them each time, also after a problem.
        problems = [undone(entry) for entry in reversed(entries)]
        clean = 0 if any(problems) else clean + 1
        if clean == _ENOUGH or not entries:
            return
        time.sleep(_PAUSE)


if __name__ == "__main__":
    sweep(last_list(sys.stdin.buffer))
