"""A rank, from its first line on: ``python -m tunetool.launch.start DIR``, started by torchrun, DeepSpeed or Slurm.

Tells the guard of its node (``tunetool.launch.node``) who it is, can be asked for its stack, and becomes the program.
Standard library alone: programs that know nothing of tunetool are watched and cleaned up after like ours.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tunetool.launch import rank

RANKS = "ranks"
"""A file for each rank that started."""
PROGRAM = "program.json"
"""The guard's word that it is there: what to run, in which environment."""
ENDED = ".ended"
"""Behind the name of that file: the exit status of one that ended by itself."""
STACK = "stack.txt"
STACK_SIGNAL = signal.SIGUSR2
"""SIGUSR1 belongs to Lightning where Slurm is about to take a job's nodes away."""
_GUARD_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1


def main(directory: str) -> None:
    """Become the program. ``directory`` is the launcher's on this node."""
    node = Path(directory)
    order = _wait_for_guard(node)
    if rank.NODE not in os.environ:
        # DeepSpeed started this: it hands variables over as text in a shell's command line, so they come by file.
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1"))
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **order["environment"]})  # noqa: S606
    # A rank whose engine was killed outright must not go on.
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
    code: object = 1
    try:
        _run_program(order["program"])
        code = 0
    except SystemExit as ended:
        code = 0 if ended.code is None else ended.code
        raise
    finally:
        # For engines whose children the guard cannot wait for.
        (node / RANKS / f"{os.environ['RANK']}{ENDED}").write_text(str(code if isinstance(code, int) else 1))


def _wait_for_guard(node: Path) -> dict[str, Any]:
    deadline = time.monotonic() + _GUARD_SECONDS
    while True:
        try:
            return dict(json.loads((node / PROGRAM).read_text()))
        except (OSError, ValueError):
            # The directory was there before anybody was told to start ranks.
            if time.monotonic() > deadline or not node.is_dir():
                raise SystemExit(f"nobody guards the ranks in `{node}`") from None
            time.sleep(0.1)


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
