"""A small QMP client: one unix socket, commands answered in order, events kept until someone asks."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunetool.errors import CannotJudge

CONNECT_SECONDS = 30.0
COMMAND_SECONDS = 60.0


class QemuEnded(CannotJudge):
    """QEMU ended while it was spoken to: it crashed, or somebody ended it."""


class Qmp:
    """A connection to one QEMU. Use it as a context manager: QEMU serves one client at a time."""

    def __init__(self, path: Path, connect_seconds: float = CONNECT_SECONDS) -> None:
        self._path = path
        self._buffer = b""
        self._events: list[dict[str, Any]] = []
        self._socket = _connect(path, connect_seconds)
        self._receive(time.monotonic() + COMMAND_SECONDS)  # the greeting
        self.command("qmp_capabilities")

    def __enter__(self) -> Qmp:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, so that the next client can connect."""
        self._socket.close()

    def command(
        self, name: str, arguments: Mapping[str, object] | None = None, timeout: float = COMMAND_SECONDS
    ) -> Any:
        """Run one command and return its result. Raises an error with QEMU's message."""
        self._send(name, arguments or {}, None)
        return self._answer(name, timeout)

    def pass_file(self, name: str, descriptor: int) -> None:
        """Pass an open file to QEMU, which can then open it as ``fd:name``."""
        self._send("getfd", {"fdname": name}, descriptor)
        self._answer("getfd", COMMAND_SECONDS)

    def wait_event(self, name: str, timeout: float, **data: object) -> dict[str, Any]:
        """The data of the next event ``name`` whose data holds every item of ``data``."""
        deadline = time.monotonic() + timeout
        while True:
            for event in self._events:
                values: dict[str, Any] = event.get("data", {})
                if event["event"] == name and all(values.get(key) == value for key, value in data.items()):
                    self._events.remove(event)
                    return values
            message = self._receive(deadline)
            if "event" in message:
                self._events.append(message)

    def _send(self, name: str, arguments: Mapping[str, object], descriptor: int | None) -> None:
        message: dict[str, object] = {"execute": name}
        if arguments:
            message["arguments"] = dict(arguments)
        line = json.dumps(message).encode() + b"\n"
        try:
            if descriptor is None:
                self._socket.sendall(line)
            else:
                socket.send_fds(self._socket, [line], [descriptor])
        except OSError as error:
            raise self._gone() from error

    def _answer(self, name: str, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        while True:
            message = self._receive(deadline)
            if "event" in message:
                self._events.append(message)
            elif "error" in message:
                raise CannotJudge(f"QEMU refused `{name}`: {message['error'].get('desc', 'no reason given')}")
            elif "return" in message:
                return message["return"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                raise CannotJudge(f"QEMU did not answer on `{self._path}`", "tunetool lab status")
            self._socket.settimeout(seconds_left)
            try:
                chunk = self._socket.recv(65536)
            except TimeoutError:
                continue
            except OSError as error:
                raise self._gone() from error
            if not chunk:
                raise self._gone()
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def _gone(self) -> QemuEnded:
        return QemuEnded(f"QEMU ended while `{self._path}` was in use", "tunetool lab status")


def _connect(path: Path, seconds: float) -> socket.socket:
    deadline = time.monotonic() + seconds
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(seconds)
            connection.connect(str(path))
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() > deadline:
                raise CannotJudge(f"`{path}`: {error.strerror or error}", "tunetool lab status") from error
            time.sleep(0.05)
