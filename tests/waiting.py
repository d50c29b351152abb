"""Waiting in tests: for a condition, never for a time.

No test may depend on how fast the machine is or on what else it does. `PATIENCE` measures nothing: it turns a hang into
a failure, and is far longer than what is waited for takes on a machine that is ten times as slow.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

PATIENCE = 600.0
"""Seconds after which a test counts as one that hangs."""

Answer = TypeVar("Answer")


def until(
    holds: Callable[[], Answer], what: str = "the condition", process: subprocess.Popen[Any] | None = None
) -> Answer:
    """Wait until ``holds`` returns something true, and return it. Fails at once if ``process``, which causes it, has ended."""
    deadline = time.monotonic() + PATIENCE
    while True:
        ended = process is not None and process.poll() is not None
        if answer := holds():
            return answer
        assert not ended, f"the process ended with {process and process.returncode} before {what} came true"
        assert time.monotonic() < deadline, f"waited {PATIENCE:g} s for {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not count: without an init that reaps, it stays for ever."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def stopped(pid: int) -> bool:
    """Whether a process has stopped, by SIGSTOP."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def gone(*pids: int) -> bool:
    """Whether none of these processes runs."""
    return until(lambda: not any(map(alive, pids)), f"the end of {pids}")
