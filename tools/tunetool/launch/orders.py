"""Sends orders to running ranks: one line of JSON to each rank, one line back, over a Unix socket.

The launcher uses ``Orders``; a rank calls ``serve``. A rank ends at once, with its child processes, when the launcher
has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.errors import CannotJudge
from tunetool.launch.local import RankFailed, Ranks
from tunetool.measure.worker import TAIL, die_with_parent

VARIABLE = "TUNETOOL_ORDERS"
_TICK = 0.2
_STRAGGLERS = 20.0
"""Seconds that the other ranks have after one reports an error: they may hang in a collective."""


class OrderFailed(RankFailed):
    """A rank reported an error. ``together``: every rank has answered, so that they can continue."""

    def __init__(self, message: str, rank: int, together: bool, raw: str = "") -> None:
        super().__init__(message, None, rank, raw)
        self.together = together


@dataclass
class _Line:
    stream: socket.socket
    rank: int = -1
    buffer: bytes = b""
    answers: list[dict[str, Any]] = field(default_factory=list)
    open: bool = True


class Orders:
    """The launcher's side, a context manager: create it, pass its ``environment`` to the ranks, then call ``meet``.

    ``directory`` must be private to this user (mode 0700), since every process that can connect can give orders. Its
    path must be short: a socket path has at most 107 bytes. Raises ``CannotJudge``.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "orders"
        self._lines: dict[int, _Line] = {}
        self._server = socket.socket(socket.AF_UNIX)
        try:
            self._server.bind(str(self._path))
            self._server.listen()
        except OSError as error:
            self._server.close()
            raise CannotJudge(
                f"`{self._path}` cannot be created: {error.strerror or error}",
                "set TMPDIR to a short path such as `/tmp`",
            ) from None

    def __enter__(self) -> Orders:
        return self

    def __exit__(self, *_: object) -> None:
        for line in self._lines.values():
            line.stream.close()
        self._server.close()
        self._path.unlink(missing_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that tell a rank where to connect."""
        return {VARIABLE: str(self._path)}

    def meet(self, ranks: Ranks, timeout: float, tick: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
        """Wait until every rank has connected; returns the hello message of each rank, by rank. Raises
        ``RankFailed``."""
        deadline = time.monotonic() + timeout
        waiting: list[_Line] = []
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            while len(self._lines) < ranks.world:
                for key, _ in selector.select(_TICK):
                    if key.fileobj is self._server:
                        waiting.append(_Line(self._server.accept()[0]))
                        selector.register(waiting[-1].stream, selectors.EVENT_READ, waiting[-1])
                    elif isinstance(key.data, _Line):
                        _receive(key.data)
                        if key.data.answers or not key.data.open:
                            selector.unregister(key.data.stream)
                        if key.data.answers:
                            self._greet(ranks, key.data)
                tick()
                _check_deadline(ranks, deadline, timeout, "start")
        return [self._lines[rank].answers.pop() for rank in range(ranks.world)]

    def _greet(self, ranks: Ranks, line: _Line) -> None:
        line.rank = int(line.answers[-1]["rank"])
        ranks.register_pid(int(line.answers[-1]["pid"]))
        self._lines[line.rank] = line

    def ask(
        self, ranks: Ranks, order: Mapping[str, Any], timeout: float, tick: Callable[[], None] = lambda: None
    ) -> list[dict[str, Any]]:
        """Send an order; returns each rank's answer, by rank. Raises ``RankFailed`` if a rank dies or does not answer
        within ``timeout`` seconds, ``OrderFailed`` if a rank reports an error."""
        text = json.dumps(order).encode() + b"\n"
        for line in self._lines.values():
            try:
                line.stream.sendall(text)
            except OSError:
                raise ranks.failure() from None
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for line in self._lines.values():
                selector.register(line.stream, selectors.EVENT_READ, line)
            while missing := [line for line in self._lines.values() if not line.answers]:
                for key, _ in selector.select(_TICK):
                    _receive(key.data)
                if any(not line.open for line in self._lines.values()):
                    raise ranks.failure()
                tick()
                if failed := self._failed():
                    deadline = min(deadline, time.monotonic() + _STRAGGLERS)
                    if time.monotonic() > deadline - _TICK and missing:
                        raise _error(failed, ranks, together=False)
                _check_deadline(ranks, deadline, timeout, str(order.get("do")))
        answers = {rank: line.answers.pop() for rank, line in self._lines.items()}
        errors = [(rank, reply) for rank, reply in sorted(answers.items()) if "error" in reply]
        if errors:
            raise _error(errors[0], ranks, together=True)
        return [answers[rank] for rank in range(ranks.world)]

    def _failed(self) -> tuple[int, dict[str, Any]] | None:
        answered = ((rank, line.answers[0]) for rank, line in self._lines.items() if line.answers)
        return next(((rank, reply) for rank, reply in answered if "error" in reply), None)

    def dismiss(self, ranks: Ranks, patience: float) -> None:
        """Tell the ranks to end, and wait up to ``patience`` seconds, so that they leave nothing in shared memory."""
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.stream.sendall(b'{"do": "end"}\n')
        with contextlib.suppress(RankFailed):
            ranks.wait(patience)


def _receive(line: _Line) -> None:
    try:
        part = line.stream.recv(65536)
    except OSError:
        part = b""
    line.open = bool(part)
    line.buffer += part
    while b"\n" in line.buffer:
        text, _, line.buffer = line.buffer.partition(b"\n")
        line.answers.append(json.loads(text))


def _check_deadline(ranks: Ranks, deadline: float, timeout: float, activity: str) -> None:
    ranks.check()
    if time.monotonic() > deadline:
        raw = ranks.messages()
        ranks.end()
        raise RankFailed(
            f"`{activity}` took longer than {timeout:.0f} s, and the ranks were ended",
            "check for stuck I/O: `dmesg | tail`",
            raw=raw,
        )


def _error(failed: tuple[int, dict[str, Any]], ranks: Ranks, together: bool) -> OrderFailed:
    rank, reply = failed
    message = f"{reply['kind']}: {reply['error']}"
    return OrderFailed(message, rank, together, str(reply.get("trace", "")) or ranks.output_of(rank))


def serve(rank: int, answer: Callable[[dict[str, Any]], dict[str, Any]], hello: Mapping[str, Any]) -> None:
    """A rank's side: answer orders until the order ``end``. An exception of ``answer`` is sent as the answer."""
    die_with_parent()
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(os.environ[VARIABLE])
        orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        _send(stream, {"rank": rank, "pid": os.getpid(), **hello})
        threading.Thread(target=_listen, args=(stream, orders), daemon=True).start()
        while (order := orders.get())["do"] != "end":
            try:
                reply = answer(order)
            except Exception as error:
                traceback.print_exc()
                trace = traceback.format_exc()[-TAIL:]
                reply = {"kind": type(error).__name__, "error": _one_line(error), "trace": trace}
            _send(stream, reply)


def _listen(stream: socket.socket, orders: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in _lines(stream):
        order = json.loads(line)
        orders.put(order)
        if order["do"] == "end":
            return
    # The launcher has ended; a rank in the middle of a save would not notice.
    with contextlib.suppress(OSError):
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _lines(stream: socket.socket) -> Iterator[bytes]:
    buffer = b""
    while True:
        try:
            part = stream.recv(65536)
        except OSError:
            return
        if not part:
            return
        *lines, buffer = (buffer + part).split(b"\n")
        yield from lines


def _send(stream: socket.socket, message: Mapping[str, Any]) -> None:
    stream.sendall(json.dumps(message).encode() + b"\n")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or "no message"
