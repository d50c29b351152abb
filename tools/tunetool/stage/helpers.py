"""Processes that copy small files for threads of this one.

A small file takes a dozen system calls, and after each of them a thread waits for the interpreter's lock: 32 threads
take four times as long for 100,000 files as one, and one has no more than one CPU.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.measure.worker import Missing, Worker, child_command
from tunetool.stage.pieces import Checksum
from tunetool.stage.small import Tally
from tunetool.stage.tree import Entry

LEAST_FILES = 5000
"""From so many small files on the processes pay."""
_FILES_OF_ONE = 1000
"""Files for which a further process pays: its start takes some 0.06 s of CPU, as long as so many files."""
_PATIENCE = math.inf
"""Seconds that a batch of small files may take: a thread waits as long for a source that does not answer."""
_CHILD = Path(__file__).resolve().with_name("child.py")


class Helper:
    """One such process. For one thread at a time."""

    def __init__(self, worker: Worker, root: Path | None, checksum: Checksum) -> None:
        self._worker, self._checksum = worker, checksum
        self._root = None if root is None else _bytes_of(str(root))
        self._cpu = 0.0

    def move(self, files: Sequence[Entry], tally: Tally, tick: Callable[[], None]) -> list[str]:
        """Read the files and write them below the root, if there is one. Returns their checksums.

        ``tick`` is called a few times a second; what it raises ends the wait. Raises ``CannotJudge`` as ``move_small``
        does, and where the process has ended.
        """
        fields = [(_bytes_of(each.path), _bytes_of(each.origin), *each[2:5], *each[7:]) for each in files]
        self._worker.tick = tick
        answer = self._worker.ask({"root": self._root, "checksum": self._checksum, "files": fields}, _PATIENCE)
        if "refused" in answer:
            raise CannotJudge(answer["refused"], answer["hint"])
        tally.add(Tally(**answer["tally"]))
        tally.helper_cpu += answer["cpu"] - self._cpu
        self._cpu = answer["cpu"]
        digests: list[str] = answer["digests"]
        return digests


def start_helpers(small: int, threads: int, root: Path | None, checksum: Checksum, stack: ExitStack) -> list[Helper]:
    """Start them, for ``small`` files and as many threads; ``stack`` ends them. None where they would not pay."""
    if small < LEAST_FILES or threads < 2:
        return []
    command = child_command(Path(sys.executable), _CHILD)
    # Of the same tunetool as this one, however it was found.
    path = [str(_CHILD.parents[2]), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    # As many as there are threads: the files of a source far away wait for its answers.
    count = max(2, min(threads, small // _FILES_OF_ONE))
    what = "a process that copies small files"
    helpers: list[Helper] = []
    # Where the machine allows no further process (`ulimit -u`), those that started do the work, or else the threads.
    with suppress(Missing):
        for _ in range(count):
            helpers.append(Helper(stack.enter_context(Worker(command, what, environment)), root, checksum))
    return helpers


def _bytes_of(name: str) -> str:
    """For JSON: a byte a letter. Both processes need not have the same locale."""
    return os.fsencode(name).decode("latin-1")
