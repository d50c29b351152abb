"""Runs programs that may take long, hang or die: with a time limit, and ended together with their child processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from typing import IO, Mapping, Optional, Sequence

from ..common.file_lock import held
from ..common.refusal import Refusal
from ..common.waiting import wait_for

_LAST = 3
_WAIT_SECONDS = 0.05


class Ended(Refusal):
    """A program that failed or did not end. The message names its purpose and quotes its last lines."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__("%s: %s" % (what, reason))
        self.reason = reason


def call(argv: Sequence[str], environment: Mapping[str, str], seconds: float, what: str, hint: str = "") -> str:
    """Run one program and return what it printed. Raises ``Ended``."""
    return call_all([(argv, environment)], seconds, what, hint)[0]


def call_all(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], seconds: float, what: str, hint: str = ""
) -> list[str]:
    """The same for several programs side by side. When one fails, the others are ended."""
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
        errors = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
        started: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, started)
        for (argv, environment), stdout, stderr in zip(commands, outputs, errors):
            started.append(
                subprocess.Popen(
                    list(argv),
                    # A group of its own: compilers and ranks end with it.
                    start_new_session=True,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    pass_fds=held(),
                    stdout=stdout,
                    stderr=stderr,
                )
            )
        bad = _wait(started, seconds)
        if bad is not None:
            reason = _reason(started[bad], _text(errors[bad]) or _text(outputs[bad]), seconds)
            raise Ended(what, reason + (". hint: %s" % hint if hint else ""))
        return [_text(stdout) for stdout in outputs]


def _wait(started: Sequence[subprocess.Popen[bytes]], seconds: float) -> Optional[int]:
    """Index of the first that failed, or of one that still runs after ``seconds``; None if all succeeded."""

    def bad() -> Optional[int]:
        return next((index for index, process in enumerate(started) if process.poll()), None)

    def is_over() -> bool:
        return bad() is not None or all(process.returncode == 0 for process in started)

    over = wait_for(is_over, seconds, _WAIT_SECONDS)
    return bad() if over else next(index for index, process in enumerate(started) if process.returncode is None)


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in started:
        # Processes that it left behind are in its group, even after it ended.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _reason(process: subprocess.Popen[bytes], text: str, seconds: float) -> str:
    code = process.poll()
    if code is None:
        return "it did not end within %g s" % seconds
    if code == -signal.SIGILL:
        return "it died of SIGILL: something in it was built for another CPU"
    if code < 0:
        return "it was killed by signal %d" % -code
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("error: ", "ERROR: "))]
    said = "; ".join(errors[-1:] or lines[-_LAST:] or ["it printed nothing"])
    return "exit status %d: %s" % (code, said)


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode("utf-8", "replace")
