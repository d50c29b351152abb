"""Makes DeepNVMe's calls, each in a process of its own: a program of ``measure/child_server.py``.

Self-contained: any Python from 3.8 with torch. The op aborts, or divides by zero, where others raise; so each row runs
in a fork of this process, which has torch in memory and no thread yet. The orders name the files of the modules that
hold the rows.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import runpy
import select
import signal
import sys
import tempfile
import time
import types
from typing import Any

_TAIL = 4000
_SIGKILL_WITH_PARENT = 1
_EXCEPTION = re.compile(
    r"(Exception ignored in|Traceback \(most recent call last\)| +File \"|    |[\w.]+(Error|Exception): )"
)
"""A line of a Python traceback."""


class Context:
    """What a row has to work with."""

    def __init__(self, order: dict[str, Any], aio: dict[str, Any]) -> None:
        import torch

        self.torch = torch
        self.directory: str = order["directory"]
        self.sector: int = order["sector"]
        self.ops: dict[str, list[str]] = order["ops"]
        """By op, the files that must be loaded for it, in their order; only ops that are built."""
        self.missing: dict[str, str] = order["missing"]
        """By op, why it is not there; ``cuda``: why there is no GPU."""
        self.byte_view: Any = runpy.run_path(order["byte_view"])["byte_view"]
        self._load, self.own_runtime = aio["load_all"], aio["own_runtime"]

    def op(self, name: str) -> Any:
        """The compiled module. Raises ``Skipped`` without it."""
        if name not in self.ops:
            raise Skipped(self.missing.get(name, "the op is not built"))
        return self._load(self.ops[name])

    def handle(self, **settings: Any) -> Any:
        """An aio_handle with small blocks, so that a small transfer has several requests."""
        return self.op("async_io").aio_handle(**{"block_size": 128 * 1024, "queue_depth": 8, **settings})

    def path(self, name: str) -> str:
        """A file of this row."""
        return os.path.join(self.directory, name)


class Skipped(Exception):
    """A row that cannot be made here, with the reason."""


class Wrong(Exception):
    """A row with another result than expected, in words."""


def answer(order: dict[str, Any]) -> dict[str, Any]:
    """``prepare``: import torch once. ``row``: make one row; its status, and what it found."""
    if order["do"] == "prepare":
        return _prepare()
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as said:
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _be_row(order, writing, said.fileno())
        os.close(writing)
        text = _collect(reading, order["seconds"])
        os.close(reading)
        if text is None:
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        said.seek(0)
        words = said.read()[-_TAIL:].decode(errors="replace")
    if text is None:
        return {"status": "hung", "found": "it did not end within %d s" % order["seconds"], "said": words}
    if not text:
        return {"status": "died", "found": _ended(status, words), "said": words}
    result: dict[str, Any] = json.loads(text)
    return {**result, "said": words}


def _prepare() -> dict[str, Any]:
    import torch

    # The op imports `deepspeed.utils` for its warning on the endurance of drives: seconds in each row, and a look for
    # GPUs, after which a fork cannot use them. This says that it was warned already.
    module = types.ModuleType("deepspeed.utils")
    module._deepspeed_nvme_write_warning_emitted = True  # type: ignore[attr-defined]  # a module of this one attribute
    sys.modules["deepspeed.utils"] = module
    return {"torch": str(torch.__version__)}


def _be_row(order: dict[str, Any], writing: int, said: int) -> None:
    """Run a row in the fork, send its result, and end without the handlers of the process that was copied."""
    result = {"status": "fail", "found": "nothing"}
    try:
        ctypes.CDLL(None).prctl(_SIGKILL_WITH_PARENT, signal.SIGKILL)
        for stream in (1, 2):
            os.dup2(said, stream)
        try:
            rows = runpy.run_path(order["module"], init_globals={"Skipped": Skipped, "Wrong": Wrong})["ROWS"]
            context = Context(order, runpy.run_path(order["aio"]))
            result = {"status": "pass", "found": rows[order["name"]](context)}
        except Skipped as reason:
            result = {"status": "skip", "found": str(reason)}
        except Wrong as reason:
            result = {"status": "fail", "found": str(reason)}
        except Exception as error:
            result = {"status": "raised", "found": "%s: %s" % (type(error).__name__, _first_line(error))}
        os.write(writing, json.dumps(result).encode())
    finally:
        os._exit(0)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0][:300]


def _collect(reading: int, seconds: float) -> str | None:
    """All that the fork writes, until it closes its end; None where that takes too long."""
    deadline = time.monotonic() + seconds
    parts: list[bytes] = []
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reading], [], [], left)[0]:
            return None
        part = os.read(reading, 65536)
        if not part:
            return b"".join(parts).decode()
        parts.append(part)


def _ended(status: int, words: str) -> str:
    """How the process ended, with the line of the op that says why."""
    if os.WIFSIGNALED(status):
        how = "the process is ended by %s" % signal.Signals(os.WTERMSIG(status)).name
    else:
        how = "the process ends with exit status %d" % os.WEXITSTATUS(status)
    # An exception of Python ends no process: what was printed of one was caught, and has nothing to do with the end.
    lines = [line.strip() for line in words.splitlines() if line.strip() and not _EXCEPTION.match(line)]
    telling = [line for line in lines if "Assertion" in line or "error" in line.lower() or "failure" in line]
    reason = (telling or lines)[-1:]
    return "%s: %s" % (how, _assertion(reason[0])) if reason else how


def _assertion(line: str) -> str:
    """Only what was asserted, where the line is glibc's."""
    _, mark, rest = line.partition("Assertion ")
    return (mark + rest if mark else line)[:200]
