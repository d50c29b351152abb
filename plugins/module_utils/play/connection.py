"""Runs a program for a module; the program ends with the module, and when the play was interrupted.

An interrupted play ends Ansible's processes on the control machine. No signal reaches the module on a node then: sshd
closes the pipe that the module would answer to, with or without a shared connection (ControlPersist), and a module that
only waits never looks at it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
from typing import IO, Callable, Mapping, Sequence

END_SECONDS = 60.0
"""Seconds that a program may take to clean up after it was asked to end."""
_LOOK_MILLISECONDS = 200
_PR_SET_PDEATHSIG = 1


def start(
    argv: Sequence[str], environment: Mapping[str, str], stdout: IO[bytes], stderr: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start ``argv`` without input, in its own session. It gets SIGTERM when this process dies."""
    # Loaded here: after the fork, the child may call only few functions.
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def end_with_parent() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(
        list(argv),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=end_with_parent,  # noqa: PLW1509  (modules run no threads)
    )


def wait(process: subprocess.Popen[bytes], stop: Callable[[], None], patience: float = END_SECONDS) -> int:
    """Wait until ``process`` ends and return its exit status.

    ``stop`` is called when the reader of this process's standard output is gone. After another ``patience`` seconds
    the process is killed with its process group.
    """
    poll = select.poll()
    poll.register(1, 0)  # reports only that the other end is closed; a file, as output may be in tests, never is
    while process.poll() is None:
        if poll.poll(_LOOK_MILLISECONDS):
            stop()
            break
    else:
        return process.wait()
    try:
        return process.wait(patience)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()
