"""Forks children that have torch imported already, from a process with one thread. Orders come on stdin.

An order ``{"do": NAME, "world": N, "with": {...}, "stop": {...}, "exit": true}`` runs the function of that name in
``ranks.py`` in N children, (rank, world, **with). ``stop``: arguments of ``stops.install`` in rank 0. ``exit``: the
children end as programs do, with what was registered for that. The answer has each child's exit status, what its function
returned, its error, and the seconds that all took from the first fork.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[threads] = "1"
warnings.simplefilter("ignore")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import ranks  # noqa: E402

import stops  # noqa: E402
from waiting import PATIENCE  # noqa: E402


def child(order: dict[str, Any], rank: int, answer: Path) -> int:
    signal.alarm(int(PATIENCE))  # ends a rank that waits for another one for ever
    try:
        if rank == 0 and "stop" in order:
            stops.install(**order["stop"])
        answered = {"value": getattr(ranks, order["do"])(rank, order["world"], **order.get("with", {}))}
    except BaseException as error:
        answered = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    answer.write_text(json.dumps(answered))
    return 1 if "error" in answered else 0


def carry_out(order: dict[str, Any]) -> list[dict[str, Any]]:
    folder, parent = Path(tempfile.mkdtemp()), os.getpid()
    try:
        return answers_of(order, [folder / str(rank) for rank in range(order["world"])])
    finally:
        # A child that exits comes here too. Without hiding an error: a process of a rank may still write there.
        if os.getpid() == parent:
            shutil.rmtree(folder, ignore_errors=True)


def answers_of(order: dict[str, Any], answers: list[Path]) -> list[dict[str, Any]]:
    children, began = [], time.monotonic()
    for rank, answer in enumerate(answers):
        pid = os.fork()
        if not pid:
            status = child(order, rank, answer)
            if order.get("exit"):
                sys.exit(status)
            os._exit(status)
        children.append(pid)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    seconds = time.monotonic() - began
    texts = [answer.read_text() if answer.exists() else "{}" for answer in answers]
    return [
        {"status": status, "seconds": seconds, **json.loads(text or "{}")}
        for status, text in zip(statuses, texts, strict=True)
    ]


for line in sys.stdin:
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would copy locks that other threads hold"
    print(json.dumps(carry_out(json.loads(line))), flush=True)
