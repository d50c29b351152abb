"""Programs that get Ctrl-C as the main thread takes the lock of a future, while a pool's thread still needs that lock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from waiting import PATIENCE

_BEFORE = """
import concurrent.futures._base as futures, signal, sys, threading

sent = threading.Event()
moments = [
    (threading.Condition.__enter__.__code__, futures.Future.result.__code__),
    (futures._AcquireFutures.__enter__.__code__, futures.wait.__code__),
]

def hold(owner, name):
    # Threads get no further than here before Ctrl-C was sent.
    work = getattr(owner, name)
    def once_it_was_sent(*arguments, **more):
        if threading.current_thread() is not threading.main_thread():
            sent.wait()
        return work(*arguments, **more)
    setattr(owner, name, once_it_was_sent)

def begin_in(owner, name):
    # Ctrl-C comes at the first such moment in it.
    work = getattr(owner, name)
    def traced(*arguments, **more):
        sys.settrace(trace)
        return work(*arguments, **more)
    setattr(owner, name, traced)

def trace(frame, event, argument):
    return locked if frame.f_back and (frame.f_code, frame.f_back.f_code) in moments else None

def locked(frame, event, argument):
    if event == "return" and not sent.is_set():
        sent.set()
        signal.raise_signal(signal.SIGINT)
    return locked
"""
_COMMAND = """
from tunetool.cli.main import main
sys.argv[0] = "tunetool"
main()
"""


def ended(program: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program, which calls ``hold`` and ``begin_in`` first, to its end."""
    command = [sys.executable, "-c", _BEFORE + program, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def ended_command(program: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """The same, and then the program is this command of tunetool."""
    return ended(program + _COMMAND, *words)
