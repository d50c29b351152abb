"""The first program of a rank: ``python -m tunetool.launch.start DIR``, run by torchrun, DeepSpeed or Slurm.

Reports its process id to the guard of its node (``tunetool.launch.node``), prepares to dump its stack on a signal, and
becomes the program. Uses only the standard library, so that programs without tunetool are watched and cleaned up too.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from tunetool.launch import rank
from tunetool.node.common.waiting import wait_for

RANKS = "ranks"
"""Name of the file that each started rank writes."""
PROGRAM = "program.json"
"""File in which the guard says what to run, in which environment."""
ENDED = ".ended"
"""Suffix of the file with the exit status of a rank that ended by itself."""
STACK = "stack.txt"
STACK_SIGNAL = signal.SIGUSR2
"""Not SIGUSR1, which Slurm sends to Lightning before it takes a job's nodes away."""
_GUARD_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1


def main(directory: str) -> None:
    """Become the program. ``directory`` is the launcher's on this node."""
    node = Path(directory)
    order = _wait_for_guard(node)
    if rank.NODE not in os.environ:
        # DeepSpeed started this, and passes variables as text in a shell command line; so they come in a file.
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1"))
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **order["environment"]})  # noqa: S606
    # A rank must not continue when its engine was killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    rank_dir = rank.out()
    for stream, number in (("stdout", 1), ("stderr", 2)):
        log = os.open(rank_dir / f"{stream}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, number)
        os.close(log)
    stack = (rank_dir / STACK).open("w")
    faulthandler.register(STACK_SIGNAL, stack, all_threads=True)
    _write_rank_file(node)
    rank.beat()
    sys.meta_path.insert(0, Imports())
    code: object = 1
    try:
        _run_program(order["program"])
        code = 0
    except SystemExit as ended:
        code = 0 if ended.code is None else ended.code
        raise
    finally:
        # For engines whose child processes the guard cannot wait for.
        (node / RANKS / f"{os.environ['RANK']}{ENDED}").write_text(str(code if isinstance(code, int) else 1))


class Imports:
    """Every module that this process looks for is progress: on a slow disk or processor torch's take minutes."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def find_spec(self, *_: object) -> None:
        """Finds nothing itself. A child that was forked shares the memory of the beats, and is not the rank."""
        if os.getpid() == self._process:
            rank.touch()


def _wait_for_guard(node: Path) -> dict[str, Any]:
    def order() -> dict[str, Any]:
        try:
            return dict(json.loads((node / PROGRAM).read_text()))
        except (OSError, ValueError):
            # The guard made the directory before the ranks were started.
            return {} if node.is_dir() else {PROGRAM: "is gone"}

    found = wait_for(order, _GUARD_SECONDS)
    if "program" not in found:
        raise SystemExit(f"no guard watches the ranks in `{node}`")
    return found


def _write_rank_file(node: Path) -> None:
    number = os.environ["RANK"]
    identity = {
        "pid": os.getpid(),
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "master": [os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")],
    }
    path = node / RANKS / number
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".new").write_text(json.dumps(identity))
    path.with_suffix(".new").rename(path)


def _run_program(program: list[str]) -> None:
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
