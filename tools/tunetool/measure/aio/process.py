"""A child that may die, abort or hang: asked by lines, watched by the clock, ended with its whole process group."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tunetool.measure.aio.spec import Failed, Missing
from tunetool.measure.fio import die_with_parent, preloads

TAIL = 4000
"""So much of the end of a child's messages is kept."""
_TICK = 0.2
_KILL_PATIENCE = 30.0


class Child:
    """A process that answers one JSON line for each that it is sent. A context: it is gone afterwards."""

    def __init__(
        self, argv: Sequence[str], what: str, environment: Mapping[str, str], tick: Callable[[], None] = lambda: None
    ) -> None:
        self.what = what
        self.tick = tick
        self._answers = b""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed in __exit__)
        clean = {name: value for name, value in environment.items() if name not in preloads(environment)}
        try:
            self._process = subprocess.Popen(
                argv,
                env={**clean, "LC_ALL": "C", "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509  (tunetool runs no threads here)
            )
        except OSError as error:
            self._stderr.close()
            raise Missing(f"`{argv[0]}` does not start: {error.strerror}", "name a Python with `--python`") from None

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self._stderr.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    @property
    def pid(self) -> int:
        """Of the process, which leads its group."""
        return self._process.pid

    def ask(self, order: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Its answer. Raises ``Failed`` when it dies, says nothing in time, answers nonsense or reports an error."""
        self.send(order)
        return self.receive(timeout)

    def send(self, order: Mapping[str, Any]) -> None:
        """Give the order and go on: others may have theirs meanwhile."""
        stdin = self._process.stdin
        assert stdin is not None  # noqa: S101  (a pipe, as asked for above)
        try:
            stdin.write(json.dumps(order).encode() + b"\n")
        except OSError:
            raise self._dead() from None

    def receive(self, timeout: float) -> dict[str, Any]:
        """The answer to what was sent."""
        line = self._line(timeout)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise Failed(f"{self.what} answered nonsense: {line[:80]!r}", raw=self.messages())
        if "error" in answer:
            raise Failed(f"{self.what}: {answer.get('kind', 'error')}: {answer['error']}", raw=self.messages())
        return answer

    def messages(self) -> str:
        """The end of what it printed."""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - TAIL))
        return self._stderr.read().decode(errors="replace")

    def end(self) -> None:
        """End it and all that it started. A second Ctrl-C does not leave it behind."""
        for _ in range(3):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
                self._process.wait(_KILL_PATIENCE)
                return

    def _line(self, timeout: float) -> str:
        stdout = self._process.stdout
        assert stdout is not None  # noqa: S101
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._answers:
                if not selector.select(_TICK):
                    self.tick()
                    if time.monotonic() > deadline:
                        self.end()
                        raise Failed(
                            f"{self.what} said nothing for {timeout:.0f} s and was ended",
                            "look for stuck I/O: `dmesg | tail`",
                            raw=self.messages(),
                        )
                    continue
                part = os.read(stdout.fileno(), 65536)
                if not part:
                    raise self._dead()
                self._answers += part
        line, _, self._answers = self._answers.partition(b"\n")
        return line.decode(errors="replace")

    def _dead(self) -> Failed:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            self.end()
            return Failed(f"{self.what} closed its output and went on", raw=self.messages())
        raw = self.messages()
        return Failed(*describe_end(self.what, code, raw), raw=raw)


_HINTS = {
    "SIGKILL": "the kernel's out-of-memory killer does this: see `dmesg | tail`",
    "SIGXFSZ": "the limit on file size is too low: see `ulimit -f`",
    "SIGILL": "the op was built for another processor: `tunetool build-ops --rebuild`",
}


def describe_end(what: str, code: int, said: str) -> tuple[str, str | None]:
    """Message and hint for a process that ended with ``code``, from the last thing that it said."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if "Assertion" in line or "mlock" in line or "error" in line.lower()]
    last = next(iter(reversed(telling or lines)), "no message")
    if code >= 0:
        return f"{what} ended with exit status {code}: {last[-300:]}", None
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"{what} was ended by {name}: {last[-300:]}", _HINTS.get(name)


def script(name: str) -> Path:
    """A program of this package that runs by itself."""
    return Path(__file__).with_name(name)
