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

_TRIES = 30


def last_list(lines: Iterable[bytes]) -> list[Entry]:
    """The last whole line; a kill may have cut off the one after it."""
    entries: list[Entry] = []
    for line in lines:
        if line.endswith(b"\n"):
            entries = json.loads(line)
    return entries


def sweep(entries: list[Entry]) -> None:
    """Take them down, the newest first. A killed program's last write may still be on its way: try again."""
    for _ in range(_TRIES):
        entries = [entry for entry in reversed(entries) if undone(entry)][::-1]
        if not entries:
            return
        time.sleep(0.5)


if __name__ == "__main__":
    sweep(last_list(sys.stdin.buffer))
