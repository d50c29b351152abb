"""Runs programs that may die, hang or be stuck in the kernel: starts them, exchanges JSON lines, and ends them.

Each runs in a session of its own, so that Ctrl-C reaches tunetool alone, which then ends it in order; and each dies
with tunetool, also when that is killed outright.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tunetool.ctrl_c import CtrlC, uninterrupted
from tunetool.errors import CannotJudge
from tunetool.node.common.commands import in_c_locale
from tunetool.node.common.files import read_text

TAIL = 4000
"""Bytes that are kept from the end of a program's messages."""
TICK = 0.2
"""Seconds between two calls of a ``tick``."""
KILL_PATIENCE = 30.0
"""Seconds that a killed process may take to end: freeing much memory takes a few. Then it is stuck in the kernel."""
POLITE = 2.0
"""Seconds that a program may take to clean up after SIGTERM."""
STUCK_HINT = "look for stuck I/O: `dmesg | tail`"

_CHILD_SERVER = Path(__file__).with_name("child_server.py")
_PRELOADS = ("LD_PRELOAD", "LD_AUDIT")
_PRELOAD_FILE = "etc/ld.so.preload"
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl
_HINTS = {
    "SIGKILL": "the kernel's out-of-memory killer does this: see `dmesg | tail`",
    "SIGXFSZ": "the limit on file size is too low: see `ulimit -f`",
    "SIGILL": "the op was built for another processor: `tunetool build-ops --rebuild`",
}


class Missing(CannotJudge):
    """What a measurement needs is not on this machine: it is left out, with this reason."""


class Failed(CannotJudge):
    """A program did not do what it said. ``raw`` is the end of what it printed."""

    def __init__(self, message: str, hint: str | None = None, raw: str = "") -> None:
        super().__init__(message, hint)
        self.raw = raw


class Overdue(Exception):
    """A program did not end in time and was ended. As text: what to add to a message, where it could not be ended."""


@dataclass(frozen=True)
class Finished:
    """A program that ended by itself."""

    code: int
    """Exit status; negative for a signal."""
    stdout: str
    stderr: str


def die_with_parent() -> None:
    """For a child, before it runs its program: when tunetool is killed outright, the kernel ends the child too."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def preloads(environment: Mapping[str, str], root: str = "/") -> list[str]:
    """What puts foreign code into every program, and so into what fio reports: variables, and a file (ld.so(8))."""
    names = [name for name in _PRELOADS if environment.get(name)]
    everywhere = read_text(f"{root}/{_PRELOAD_FILE}")
    return [*names, f"/{_PRELOAD_FILE}"] if everywhere else names


def foreign_code(environment: Mapping[str, str]) -> list[str]:
    """Why the figures of a process in ``environment`` may be wrong: a line for each of its ``preloads``."""
    return [f"`{name}` was set, so foreign code ran in tunetool itself: unset it" for name in preloads(environment)]


def without_preloads(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment less the variables that put foreign code into a program."""
    return {name: value for name, value in environment.items() if name not in _PRELOADS}


def start(
    argv: Sequence[str],
    environment: Mapping[str, str],
    directory: Path | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.PIPE,
    stderr: int | IO[bytes] = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    """Start a program that dies with tunetool. Raises ``OSError`` where it does not start. ``end`` must follow."""
    _left_behind[:] = [process for process in _left_behind if process.poll() is None]

    def popen() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            argv,
            cwd=directory,
            env=without_preloads(environment),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            bufsize=0,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  (tunetool runs no threads here)
        )

    return uninterrupted(popen, _end_and_close)


def start_talking(
    argv: Sequence[str], stdin: int = subprocess.DEVNULL, stdout: int = subprocess.DEVNULL
) -> subprocess.Popen[str]:
    """Start a program with the user's environment, whose messages are text. The caller reads them, and ends it.

    Raises ``OSError`` where it does not start.
    """
    return subprocess.Popen(
        argv,
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def finish(process: subprocess.Popen[bytes], timeout: float, tick: Callable[[], None] = lambda: None) -> Finished:
    """Wait for the end of a program whose output goes to pipes, calling ``tick`` a few times a second.

    The program is gone when this returns or raises, also on Ctrl-C, unless it is stuck in the kernel. Raises
    ``Overdue``.
    """
    deadline = time.monotonic() + timeout
    try:
        while True:
            try:
                stdout, stderr = process.communicate(timeout=TICK)
                return Finished(process.returncode, _text(stdout), _text(stderr))
            except subprocess.TimeoutExpired:
                tick()
                if time.monotonic() > deadline:
                    raise Overdue("" if end(process, POLITE) else f"; {stuck(process.pid)}") from None
    finally:
        _end_and_close(process, POLITE)


def end(process: subprocess.Popen[bytes], polite: float = 0.0) -> bool:
    """End a program and its process group: by SIGTERM for ``polite`` seconds, then by SIGKILL.

    False where it is still there, stuck in the kernel: nothing ends it then, and waiting for it would have no limit.
    Ctrl-C does not leave it behind, and counts once it has ended.
    """
    if process.returncode is not None:
        return True
    ctrl_c = CtrlC()
    waited = process in _left_behind
    if polite and not waited:
        _signal_group(process, signal.SIGTERM)
        _has_ended(process, polite, ctrl_c)
    # Before its leader is reaped: until then no other group gets its number.
    _signal_group(process, signal.SIGKILL)
    ended = _has_ended(process, 0.0 if waited else KILL_PATIENCE, ctrl_c)
    if ended:
        process.wait()
    elif not waited:
        _left_behind.append(process)
    ctrl_c.deliver()
    return ended


def _end_and_close(process: subprocess.Popen[bytes], polite: float = 0.0) -> None:
    try:
        end(process, polite)
    finally:
        close_pipes(process)


_left_behind: list[subprocess.Popen[bytes]] = []
"""Stuck in the kernel, and waited for once; reaped when the kernel lets go of them and the next program starts."""


def stuck(pid: int) -> str:
    """For people: a process that even SIGKILL does not end."""
    stats = [read_text(str(path)) or "" for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    states = {stat.rpartition(")")[2].split()[0] for stat in stats if ")" in stat}
    # Its other threads are gone already, or wait for the one that the kernel holds.
    state = "D" if "D" in states else "".join(sorted(states)) or "?"
    return f"process {pid} is left behind: it does not end, not even by SIGKILL (state {state})"


def close_pipes(process: subprocess.Popen[bytes]) -> None:
    """Close this end of what a program reads and writes."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _has_ended(process: subprocess.Popen[bytes], patience: float, ctrl_c: CtrlC) -> bool:
    """Whether it ends in time. It is not reaped."""

    def is_over() -> bool:
        try:
            return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True  # reaped already

    return ctrl_c.wait_for(is_over, patience, 0.01)


def child_command(python: Path, program: Path) -> list[str]:
    """For a ``Worker``: ``python`` runs ``program``, a file with a function ``answer`` (see ``child_server.py``)."""
    return [str(python), str(_CHILD_SERVER), str(program)]


class Worker:
    """A program that answers one JSON line for each that it is sent. A context manager, which ends it."""

    def __init__(
        self, argv: Sequence[str], what: str, environment: Mapping[str, str], tick: Callable[[], None] = lambda: None
    ) -> None:
        self.what = what
        self.tick = tick
        self._answers = b""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed in __exit__)
        whole = {**in_c_locale(environment), "PYTHONUNBUFFERED": "1"}
        try:
            self._process = start(argv, whole, stdin=subprocess.PIPE, stderr=self._stderr)
        except OSError as error:
            self._stderr.close()
            raise Missing(f"`{argv[0]}` does not start: {error.strerror}", "name a Python with `--python`") from None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.end()
        finally:
            self._stderr.close()
            close_pipes(self._process)

    @property
    def pid(self) -> int:
        """Of the process, which leads its group."""
        return self._process.pid

    def ask(self, order: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Its answer. Raises ``Failed`` when it dies, says nothing in time, answers nonsense or reports an error."""
        self.send(order)
        return self.receive(timeout)

    def send(self, order: Mapping[str, Any]) -> None:
        """Send the order without waiting for the answer."""
        stdin = self._process.stdin
        assert stdin is not None  # noqa: S101  (a pipe, as asked for above)
        try:
            stdin.write(json.dumps(order).encode() + b"\n")
        except (OSError, ValueError):  # the latter where its pipes are closed already
            raise self.dead() from None

    def receive(self, timeout: float) -> dict[str, Any]:
        """The answer to what was sent."""
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self.output, selectors.EVENT_READ)
            answer = self._taken()
            while answer is None:
                if selector.select(TICK):
                    answer = self.read()
                    continue
                self.tick()
                if time.monotonic() > deadline:
                    how = "was ended" if self.end() else stuck(self.pid)
                    message = f"{self.what} said nothing for {timeout:.0f} s and {how}"
                    raise Failed(message, STUCK_HINT, raw=self.messages())
        if "error" in answer:
            raise Failed(f"{self.what}: {answer.get('kind', 'error')}: {answer['error']}", raw=self.messages())
        return answer

    @property
    def output(self) -> IO[bytes]:
        """What it answers on, for a selector; ``read`` it then."""
        stdout = self._process.stdout
        assert stdout is not None  # noqa: S101  (a pipe, as asked for above)
        return stdout

    def read(self) -> dict[str, Any] | None:
        """What has come: an answer, which may be an ``error``; None if that is not whole yet. Raises ``Failed``."""
        part = os.read(self.output.fileno(), 65536)
        if not part:
            raise self.dead()
        self._answers += part
        return self._taken()

    def _taken(self) -> dict[str, Any] | None:
        if b"\n" not in self._answers:
            return None
        line, _, self._answers = self._answers.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            text = line.decode(errors="replace")
            raise Failed(f"{self.what} answered nonsense: {text[:80]!r}", raw=self.messages())
        return answer

    def messages(self) -> str:
        """The end of what it printed; nothing once its pipes are closed."""
        if self._stderr.closed:
            return ""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - TAIL))
        return self._stderr.read().decode(errors="replace")

    def end(self) -> bool:
        """End it and all that it started. False where it is stuck in the kernel."""
        return end(self._process)

    def finish(self, patience: float) -> None:
        """Let it end by itself: it gets no more orders, and ``patience`` seconds."""
        ctrl_c = CtrlC()
        if self._process.stdin is not None:
            self._process.stdin.close()
        _has_ended(self._process, patience, ctrl_c)
        ctrl_c.deliver()

    def has_ended(self) -> bool:
        """Whether it has ended, also while a process that it started keeps its output open. It is not reaped."""
        return self._process.returncode is not None or self._seen() is not None

    def killed(self) -> bool:
        """Whether a signal has ended it. It is not reaped."""
        status = self._process.returncode
        if status is not None:
            return status < 0
        seen = self._seen()
        return seen is not None and seen.si_code != os.CLD_EXITED

    def _seen(self) -> os.waitid_result | None:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def dead(self) -> Failed:
        """For one that has closed its output: it is ended, and the error says how it ended."""
        ctrl_c = CtrlC()
        closed = self._process.returncode is None and not _has_ended(self._process, 5, ctrl_c)
        ctrl_c.deliver()
        if closed:
            self.end()
            return Failed(f"{self.what} closed its output and went on", raw=self.messages())
        self.end()
        raw = self.messages()
        return Failed(*describe_end(self.what, self._process.returncode, raw), raw=raw)


def ask_all(
    workers: Sequence[Worker], orders: Sequence[Mapping[str, Any]], timeout: float, tick: Callable[[], None]
) -> list[dict[str, Any]]:
    """The answers of workers that do not wait for each other, to one order each, which they get at the same time.

    Raises ``Failed`` as ``Worker.ask`` does; then the other answers may still come.
    """
    for worker, order in zip(workers, orders, strict=True):
        worker.tick = tick
        worker.send(order)
    end = time.monotonic() + timeout
    return [worker.receive(max(1.0, end - time.monotonic())) for worker in workers]


def describe_end(what: str, code: int, output: str) -> tuple[str, str | None]:
    """Message and hint for a process that ended with ``code``, from its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if "Assertion" in line or "mlock" in line or "error" in line.lower()]
    last = next(iter(reversed(telling or lines)), "no message")
    if code >= 0:
        return f"{what} ended with exit status {code}: {last[-300:]}", None
    name, hint = describe_signal(-code)
    return f"{what} was ended by {name}: {last[-300:]}", hint


def describe_signal(number: int) -> tuple[str, str | None]:
    """A signal's name, and what it usually means."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return name, _HINTS.get(name)


def _text(output: bytes) -> str:
    """The text with line feeds as the only line ends."""
    return output.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
