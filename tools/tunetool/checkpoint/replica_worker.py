"""The process that replicates: ``python -m tunetool.checkpoint.replica_worker``. Its stdin has its order as a line of
JSON and the bytes of `.metadata`, which may be on another node.

Files go by rsync over ssh; ``replica_receiver`` verifies them on the other side. This imports no torch, and continues
when training dies. On stdout it writes ``{"path"}`` of the replica on the peer, or ``{"problem"}``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from tunetool.checkpoint import identity, markers
from tunetool.checkpoint.drain_worker import answer
from tunetool.checkpoint.identity import Identity
from tunetool.checkpoint.os_errors import naming_errors, warn
from tunetool.checkpoint.pace import Pace, saving, yield_to_training
from tunetool.checkpoint.replica_receiver import Incoming
from tunetool.checkpoint.retention import leave_replica_note
from tunetool.checkpoint.transfer import Changed, digest_of
from tunetool.errors import CannotJudge, TunetoolError
from tunetool.measure.worker import die_with_parent
from tunetool.node.common.commands import in_c_locale, last_line
from tunetool.node.common.file_lock import FileLock

_AGAIN = "the checkpoint on this node is unchanged; replicate it again: it continues with what was sent"
RSYNC = ("rsync", "--times", "--inplace", "--no-whole-file", "-s")
"""In place: what came before an interruption is what it continues with, and no other files are left."""
_ANSWERS = {"ready", "saving", "path", "error"}
_POLL_SECONDS = 0.01
_END_SECONDS = 10.0
"""Seconds that ssh may take to end once the other side has."""


@dataclass(frozen=True)
class Outgoing:
    """What a node sends to its peer; see ``replicating.replicate`` for the options."""

    step_dir: str
    peer: str
    ssh: list[str]
    """The command that reaches the peer, with its options."""
    receiver: list[str]
    """What runs there."""
    incoming: dict[str, Any]
    """``Incoming``, as JSON has it."""


class Worker:
    """Sends one replica."""

    def __init__(self, order: Outgoing) -> None:
        self.order, self.incoming = order, Incoming(**order.incoming)
        self.step_dir = Path(order.step_dir)
        self.sources = identity.parsed(self.incoming.sources)
        self.pace = Pace(self.step_dir.parent, self.incoming.rate)

    def run(self, metadata: bytes) -> str:
        """Send, and wait until the peer has verified everything; returns the path there. Raises ``TunetoolError``."""
        # Create the file now, so that writers find it from here on.
        with saving(self.step_dir.parent):
            pass
        with naming_errors(self.step_dir, _AGAIN):
            lock = FileLock.on(self.step_dir)
        with lock, _Peer(self.order, self.incoming.patience) as peer:
            lock.take(shared=True)
            known = Identity.parse(self.incoming.metadata) if self.incoming.metadata is not None else None
            leave_replica_note(self.step_dir, self.incoming.digest, self.sources, {}, known)
            peer.send(json.dumps(asdict(self.incoming)).encode() + b"\n" + metadata)
            answer = peer.answer()
            if "ready" in answer:
                self._rsync(peer, str(answer["ready"]))
                digests = {}
                if self.incoming.items is None:
                    for name in self.sources:
                        with naming_errors(self.step_dir / name, _AGAIN):
                            digests[name] = digest_of(self.step_dir / name, self.pace.wait)
                self._require_unchanged()
                leave_replica_note(self.step_dir, self.incoming.digest, self.sources, digests, known)
                peer.send(json.dumps({name: asdict(filed) for name, filed in digests.items()}).encode() + b"\n")
                answer = peer.answer()
            return f"{self.order.peer}:{answer['path']}"

    def _require_unchanged(self) -> None:
        sources = dict(self.sources)
        if self.incoming.metadata is not None:
            sources[markers.METADATA] = Identity.parse(self.incoming.metadata)
        now = identity.look_at(self.step_dir, sources)
        for name, source in sources.items():
            if now.get(name) != source:
                raise Changed(self.step_dir / name, "its replica was asked for")

    def _rsync(self, peer: _Peer, partial: str) -> None:
        """Bring the files into the directory ``partial`` of the peer."""
        rate = self.incoming.rate
        argv = [
            *RSYNC,
            "--copy-links",
            "--from0",
            "--files-from=-",
            f"--rsh={shlex.join(self.order.ssh)}",
            "--rsync-path=nice -n 10 rsync",
        ]
        argv += [f"--bwlimit={math.ceil(rate / 1024)}"] if rate is not None else []
        names = b"".join(os.fsencode(name) + b"\0" for name in self.sources)
        with tempfile.TemporaryFile() as messages, tempfile.TemporaryFile() as listed:
            listed.write(names)
            listed.seek(0)
            argv += [f"{self.step_dir}/", f"{self.order.peer}:{partial}/"]
            with contextlib.closing(Program(argv, listed, messages)) as program:
                self._watch(program.process, peer)
            if program.process.returncode:
                status, said = program.process.returncode, first_line(_text(messages))
                raise CannotJudge(
                    f"`rsync` to `{self.order.peer}` failed with status {status}: {said}",
                    _AGAIN,
                )

    def _watch(self, process: subprocess.Popen[bytes], peer: _Peer) -> None:
        """Wait until rsync has ended; it is stopped while a save runs on either side."""
        stopped, moved, since = False, "", time.monotonic()
        while process.poll() is None:
            peer.listen()
            if (must_stop := self.pace.must_wait() or peer.saving) != stopped:
                # Not its ssh, which tells a slow peer from a dead one.
                process.send_signal(signal.SIGSTOP if must_stop else signal.SIGCONT)
                stopped = must_stop
            now = _moved(process.pid)
            if now != moved or stopped:
                moved, since = now, time.monotonic()
            elif time.monotonic() - since > self.incoming.patience:
                raise CannotJudge(
                    f"`{self.order.peer}` took nothing for {self.incoming.patience:g} s",
                    "check its drives and its network, then replicate the step again",
                )
            time.sleep(_POLL_SECONDS)


class _Peer:
    """The receiver on the other side."""

    def __init__(self, order: Outgoing, patience: float) -> None:
        self.saving = False
        self._name, self._patience, self._heard = order.peer, patience, time.monotonic()
        with contextlib.ExitStack() as stack:
            self._messages = stack.enter_context(tempfile.TemporaryFile())
            argv = [*order.ssh, order.peer, shlex.join(order.receiver)]
            program = Program(argv, subprocess.PIPE, self._messages, subprocess.PIPE)
            stack.callback(program.close)
            self._process, self._stack = program.process, stack.pop_all()
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> _Peer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._stack.close()

    def _read(self) -> None:
        stream = self._process.stdout
        while stream is not None and (line := stream.readline()):
            self._lines.put(line)
        self._lines.put(b"")

    def send(self, content: bytes) -> None:
        """Bring it to the other side. Raises ``CannotJudge`` if that takes nothing, or has an error."""
        stream, rest = self._process.stdin, memoryview(content)
        if stream is None:
            return
        os.set_blocking(stream.fileno(), False)
        # If it is gone, its answer says why.
        with contextlib.suppress(BrokenPipeError):
            while rest:
                self.listen()
                if select.select([], [stream], [], _POLL_SECONDS)[1]:
                    rest, self._heard = rest[os.write(stream.fileno(), rest) :], time.monotonic()

    def answer(self) -> dict[str, Any]:
        """Its next answer that is more than a sign of life. Raises ``CannotJudge`` if it is an error, or none comes."""
        while True:
            answer = self._next(_POLL_SECONDS)
            if answer is not None:
                return answer

    def listen(self) -> None:
        """Take what it said meanwhile. Raises ``CannotJudge`` as ``answer`` does."""
        self._next(0.0)

    def _next(self, seconds: float) -> dict[str, Any] | None:
        end = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                if time.monotonic() - self._heard > self._patience:
                    raise CannotJudge(
                        f"`{self._name}` gave no sign of life for {self._patience:g} s",
                        "check that the node is alive, then replicate the step again",
                    ) from None
                return None
            self._heard = time.monotonic()
            try:
                answer = json.loads(line)
                if not isinstance(answer, dict) or not answer.keys() & _ANSWERS:
                    raise ValueError
            except (ValueError, RecursionError):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_SECONDS)
                said = (
                    f"it said `{line.decode(errors='replace').strip()}`" if line else last_line(_text(self._messages))
                )
                raise CannotJudge(
                    f"`{self._name}` does not answer: {said}",
                    "`ssh` must lead there without a password, to a Python with tunetool; see `ssh=` and `python=`",
                ) from None
            if "error" in answer:
                raise CannotJudge(f"`{self._name}`: {answer['error']}", answer.get("hint", _AGAIN))
            if "saving" not in answer:
                return dict(answer)
            self.saving = bool(answer["saving"])


class Program:
    """A program that has ended, by itself or not, once this is closed."""

    def __init__(
        self,
        argv: Sequence[str],
        stdin: int | IO[bytes],
        stderr: IO[bytes],
        stdout: int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> None:
        try:
            self.process = subprocess.Popen(
                argv,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=in_c_locale(os.environ),
                pass_fds=pass_fds,
                preexec_fn=die_with_parent,  # noqa: PLW1509  (the only other thread holds none of its locks)
            )
        except FileNotFoundError:
            raise CannotJudge(f"`{argv[0]}` is not installed", f"install {argv[0]} on every node") from None

    def close(self) -> None:
        # Also one that was stopped.
        self.process.kill()
        self.process.wait()


def _moved(pid: int) -> str:
    """Changes whenever the process has read or written anything."""
    try:
        return Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return ""


def _text(messages: IO[bytes]) -> str:
    messages.seek(0)
    return messages.read().decode(errors="replace")


def first_line(messages: str) -> str:
    """Of rsync's messages: what follows sums up. Warnings of ssh come before."""
    lines = [line.strip() for line in messages.splitlines()]
    return next((line for line in lines if line and not line.startswith(("Warning:", "**"))), "it said nothing")


def warned(step_dir: str | Path, peer: str, error: TunetoolError | OSError) -> TunetoolError:
    """The error for which there is no replica, once it was printed as a warning."""
    if isinstance(error, OSError):
        error = CannotJudge(f"`{error.filename or 'system call'}`: {error.strerror or error}", _AGAIN)
    warn(f"no replica of `{step_dir}` on `{peer}`: {error.line}")
    return error


def main() -> int:
    """Read the order from stdin, replicate, and write the result to stdout. Returns the exit status."""
    yield_to_training()
    order = Outgoing(**json.loads(sys.stdin.buffer.readline()))
    try:
        path = Worker(order).run(sys.stdin.buffer.read())
    except (TunetoolError, OSError) as caught:
        error = warned(order.step_dir, order.peer, caught)
        answer({"problem": error.line})
        return int(error.exit_code)
    answer({"path": path})
    return 0


if __name__ == "__main__":
    sys.exit(main())
