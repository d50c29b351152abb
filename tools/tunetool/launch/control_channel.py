"""The connections between the guards of a run: each guard reports to that of the first node, which decides for all.

They exchange JSON lines over TCP several times a second in both directions, so that silence means a lost node. A guard
must send the secret of the run first; other connections are closed.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from tunetool.launch.decision import LOST_SECONDS, MEET_SECONDS, Decision, Limits, Moments, Report, decide, lost
from tunetool.launch.spec import Failure, NodeSpec
from tunetool.launch.watchdog import Beat, Stuck
from tunetool.node.common.waiting import wait_for

_EVERY = 0.2
_PART_SECONDS = 3.0
_LONGEST = 4 * 2**20


class ControlChannel(Protocol):
    """A guard's connection to the rest of the run."""

    def exchange(self, report: Report) -> Decision:
        """Send a report, and return the current decision. Never waits."""


@contextlib.contextmanager
def meet_others(spec: NodeSpec) -> Iterator[ControlChannel]:
    """The connection of this node. When the context ends on the first node, the others get the final decision."""
    hub = Hub(spec) if spec.node == 0 else None
    channel = hub or Follower(spec)
    try:
        yield channel
    finally:
        channel.close()


class Hub:
    """The side of the first node, which decides; also used if there is only one node."""

    def __init__(self, spec: NodeSpec) -> None:
        self._limits = Limits(spec.hosts, spec.ranks_per_host, spec.timeout, spec.stall)
        self._run = spec.run
        self._began = time.monotonic()
        self._moments = Moments()
        self._reports: dict[int, Report] = {}
        self._last_heard: dict[int, float] = {}
        self._guests: list[_Stream] = []
        self._last_sent = 0.0
        self._decision = Decision("go")
        self._server: socket.socket | None = None
        if spec.master is not None and len(spec.hosts) > 1:
            # Listen on every address: this host's own name may resolve to its loopback address here.
            family = socket.AF_INET6 if ":" in spec.master[0] else socket.AF_INET
            self._server = socket.create_server(("", spec.line_port), family=family)
            self._server.setblocking(False)

    def exchange(self, report: Report) -> Decision:
        """Decide for all nodes. A decision to end is final."""
        self._reports[report.node] = report
        self._listen()
        if self._decision.do != "end":
            now = time.monotonic()
            silent = {node: now - heard for node, heard in self._last_heard.items()}
            self._decision = decide(self._limits, self._reports, silent, now - self._began, self._moments)
        if time.monotonic() - self._last_sent > _EVERY or self._decision.do == "end":
            self._last_sent = time.monotonic()
            for guest in self._guests:
                if guest.node is not None:
                    guest.send(asdict(self._decision))
        return self._decision

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while self._server is not None:
                self._guests.append(_Stream(self._server.accept()[0]))
        for guest in list(self._guests):
            for message in guest.receive():
                if guest.node is None:
                    has_secret = hmac.compare_digest(str(message.get("run")), self._run)
                    node = message.get("node")
                    if not has_secret or not isinstance(node, int) or not 0 < node < len(self._limits.hosts):
                        guest.close()
                        break
                    guest.node = node
                else:
                    self._reports[guest.node] = _report(message)
                    self._last_heard[guest.node] = time.monotonic()
            if guest.closed:
                self._guests.remove(guest)
                if guest.node is not None:
                    self._last_heard[guest.node] = -math.inf

    def close(self) -> None:
        """Send the final decision, wait a few seconds until the other nodes have read it, then close."""
        if self._decision.do != "end":
            self._decision = Decision("end", Failure("the run was ended", self._limits.hosts[0]))
            for guest in self._guests:
                guest.send(asdict(self._decision))
        # A guest closes after it has read the decision; closing first could discard the data.
        wait_for(lambda: not self._guests, _PART_SECONDS, 0.02, self._listen)
        for guest in self._guests:
            guest.close()
        if self._server is not None:
            self._server.close()


class Follower:
    """The side of every other node."""

    def __init__(self, spec: NodeSpec) -> None:
        assert spec.master is not None  # noqa: S101  (of several nodes each knows where they meet)
        self._spec = spec
        self._address = (spec.master[0], spec.line_port)
        self._began = time.monotonic()
        self._tried = -math.inf
        self._last_sent = 0.0
        self._last_heard = time.monotonic()
        self._stream: _Stream | None = None
        self._decision = Decision("go")

    def exchange(self, report: Report) -> Decision:
        """Report, and return the decision of the first node; if that node is silent, the decision is to end."""
        if self._decision.do == "end":
            return self._decision
        if self._stream is None:
            self._connect()
            if self._stream is None:
                return self._decision
        now = time.monotonic()
        if now - self._last_sent > _EVERY or report.state != "running" or report.stuck is not None:
            self._last_sent = now
            self._stream.send(asdict(report))
        for message in self._stream.receive():
            self._last_heard = now
            failure = message.get("failure")
            self._decision = Decision(message["do"], None if failure is None else Failure(**failure))
            if self._decision.do == "end":
                return self._decision
        if self._stream.closed or now - self._last_heard > LOST_SECONDS:
            self._decision = Decision("end", lost(self._spec.hosts[0]))
        return self._decision

    def _connect(self) -> None:
        now = time.monotonic()
        if now - self._tried < _EVERY:
            return
        self._tried = now
        try:
            stream = _Stream(socket.create_connection(self._address, timeout=2.0))
        except OSError as error:
            if now - self._began > MEET_SECONDS:
                where = f"`{self._spec.hosts[0]}` at {self._address[0]} port {self._address[1]}"
                why = Failure(
                    f"`{self._spec.host}` cannot connect to {where}: {error.strerror or error}",
                    self._spec.host,
                    "the nodes of a run must be able to connect to each other: check for a firewall",
                )
                self._decision = Decision("end", why)
            return
        self._last_heard = time.monotonic()
        self._stream = stream
        stream.send({"run": self._spec.run, "node": self._spec.node})

    def close(self) -> None:
        """Close the connection, which the first node notices."""
        if self._stream is not None:
            self._stream.close()


class _Stream:
    """JSON lines over a non-blocking socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.node: int | None = None
        self.closed = False
        self._connection = connection
        self._read = b""
        self._unsent = b""

    def send(self, message: Mapping[str, Any]) -> None:
        self._unsent += json.dumps(message).encode() + b"\n"
        try:
            self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except BlockingIOError:
            if len(self._unsent) > _LONGEST:
                self.close()
        except OSError:
            self.close()

    def receive(self) -> Iterator[dict[str, Any]]:
        while not self.closed:
            try:
                part = self._connection.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            self._read += part
            if not part or len(self._read) > _LONGEST:
                self.close()
        *lines, self._read = self._read.split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self.close()
                return
            yield message

    def close(self) -> None:
        self.closed = True
        self._connection.close()


def _report(message: Mapping[str, Any]) -> Report:
    failure, stuck = message["failure"], message["stuck"]
    return Report(
        message["node"],
        message["state"],
        None if failure is None else Failure(**failure),
        {int(rank): Beat(**beat) for rank, beat in message["beats"].items()},
        None if stuck is None else {int(rank): Stuck(**where) for rank, where in stuck.items()},
        message["compiling"],
    )
