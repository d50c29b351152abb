"""fio's random reads of the file, for the benchmark: what a reader of such samples can reach on this machine.

The orders are those of ``token_child.py``. fio reads blocks of a sample in a random order, as many bytes as the file
has or for as long as a pass may take: cold past the page cache by libaio, warm by ``threads`` threads through it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunetool.bench.dataset.token_child import counted
from tunetool.errors import CannotJudge
from tunetool.measure.fio import Fio, Outcome, execute, find_fio, shares
from tunetool.measure.tester import without_storage

_SECTOR = 512
"""Reads past the page cache are of whole sectors."""
_JOBS, _DEPTH = 4, 16
"""Of the cold reads, as fio's rungs have them."""
_CEILING_SECONDS = 1.0
_PATIENCE = 60.0


class _Here:
    """The order of this process."""

    fio: Fio
    order: Mapping[str, Any] = {}


def command(fio: Fio, order: Mapping[str, Any], seconds: float) -> list[str]:
    """The call of one pass."""
    is_cold = order["state"] == "cold"
    jobs, size = _JOBS if is_cold else order["threads"], order["sample_bytes"]
    whole = order["count"] * size
    cold, warm = ["--ioengine=libaio", f"--iodepth={_DEPTH}", "--direct=1"], ["--ioengine=psync", "--direct=0"]
    return [
        fio.path,
        "--name=samples",
        "--thread=1",
        f"--numjobs={jobs}",
        "--group_reporting=1",
        "--readonly",
        "--invalidate=0",
        "--rw=randread",
        f"--bs={size}",
        f"--size={whole}",
        # Jobs share the file's bytes.
        f"--io_size={max(size, whole // jobs)}",
        f"--runtime={max(1, round(seconds * 1000))}ms",
        *(cold if is_cold else warm),
        # fio takes a colon for the end of a name.
        "--filename=" + str(order["file"]).replace(":", "\\:"),
        f"--randseed={order['seed'] + 1}",
        "--output-format=json",
    ]


def run(argv: list[str], seconds: float) -> Outcome:
    """What fio did. Raises ``FioFailed``."""
    printed = execute(_Here.fio, argv, Path("/"), os.environ, seconds + _PATIENCE)
    (share,) = shares(_Here.fio, "read", *printed).values()
    return share


def start(order: Mapping[str, Any]) -> dict[str, Any]:
    """See the module."""
    try:
        _Here.fio = find_fio(os.environ)
    except CannotJudge as error:
        return {"left_out": error.line}
    if order["state"] == "cold" and order["sample_bytes"] % _SECTOR:
        why = f"fio reads past the page cache by {_SECTOR} bytes, and a sample has {order['sample_bytes']}"
        return {"left_out": why}
    _Here.order = order
    ceiling = run(without_storage(command(_Here.fio, order, _CEILING_SECONDS), 8 * _CEILING_SECONDS), _CEILING_SECONDS)
    return {"ceiling": ceiling.rate, "facts": {"fio": _Here.fio.version}}


def take_pass(seconds: float) -> dict[str, Any]:
    """See the module."""
    outcomes: list[Outcome] = []

    def work() -> int:
        outcomes.append(run(command(_Here.fio, _Here.order, seconds), seconds))
        return outcomes[0].requests

    answered = counted(work)
    (done,) = outcomes
    # By fio's own clock: that of the program would have its start and its end.
    return {**answered, "seconds": done.seconds, "cores": done.cores, "bytes": done.claimed_bytes}


def answer(order: Mapping[str, Any]) -> dict[str, Any]:
    """See the module."""
    if order["do"] == "start":
        return start(order)
    return take_pass(order["seconds"]) if order["do"] == "pass" else {}
