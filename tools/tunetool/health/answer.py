"""Answers ``ft_launcher --ft-node-health-check-endpoint`` of nvidia-resiliency-ext: a gRPC server for one connection.

The protocol is NVIDIA's ``nvhcd.proto`` (nvidia-resiliency-ext, src/nvidia_resiliency_ext/shared_utils/proto): the
unary call ``nvhcd.HealthCheckService/RunHealthCheck`` over a Unix socket. Its response has ``success``, ``exit_code``,
``output`` (JSON with ``fail_count`` and ``failed_checks``) and ``error``. The launcher takes a node for healthy where
the call fails, so what is unknown is answered with gRPC's UNAVAILABLE.

No grpcio: nodes would need its wheel, and it cannot serve a socket of systemd's. What a unary call needs of HTTP/2
(RFC 9113) and of gRPC over it is below.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from tunetool.health.hpack import Decoder, Malformed
from tunetool.health.results import Health, answered

PATH = "/nvhcd.HealthCheckService/RunHealthCheck"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SILENCE = 5.0
"""Seconds after which a caller that says nothing is left: there are few connections at a time."""
_CALLS = 100
_FRAME = 1 << 14
_REQUEST = 1 << 16
_DATA, _HEADERS, _SETTINGS, _PING, _GOAWAY, _CONTINUATION = 0, 1, 4, 6, 7, 9
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 1, 1, 4, 8, 32
_UNIMPLEMENTED, _UNAVAILABLE = 12, 14
_SHOWN = 20
"""Failed checks that are named."""


@dataclass
class _Call:
    block: bytes = b""
    path: str = ""
    size: int = 0
    ends: bool = field(default=False)


def main() -> int:
    """Serve the connection that systemd passes as standard input."""
    answer_connection(0, answered)
    return 0


def answer_connection(handle: int, health: Callable[[], Health]) -> None:
    """Serve the connected socket ``handle`` until the caller closes it."""
    with socket.socket(fileno=handle) as connection:
        connection.settimeout(SILENCE)
        try:
            _Connection(connection, health).serve()
        except (OSError, Malformed):
            # The caller is gone, says nothing, or speaks something else.
            return


class _Connection:
    def __init__(self, connection: socket.socket, health: Callable[[], Health]) -> None:
        self._connection, self._health = connection, health
        self._decoder = Decoder()
        self._calls: dict[int, _Call] = {}

    def serve(self) -> None:
        """Read frames, and answer each call when it is whole."""
        if self._take(len(PREFACE)) != PREFACE:
            return
        self._send(_SETTINGS, 0, 0)
        for _ in range(_CALLS):
            while not self._frame():
                pass
        self._send(_GOAWAY, 0, 0, bytes(8))

    def _frame(self) -> bool:
        """Read a frame; True after an answer. Raises ``OSError`` at the end."""
        head = self._take(9)
        length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        stream = int.from_bytes(head[5:], "big") & 0x7FFFFFFF
        if length > _FRAME:
            raise Malformed("a frame is too large")
        payload = self._take(length)
        if kind == _SETTINGS and not flags & _ACK:
            self._send(_SETTINGS, _ACK, 0)
        elif kind == _PING and not flags & _ACK:
            self._send(_PING, _ACK, 0, payload)
        elif kind in (_HEADERS, _CONTINUATION):
            return self._headers(kind, flags, stream, payload)
        elif kind == _DATA:
            call = self._calls.get(stream)
            if call is None:
                raise Malformed("data of no call")
            call.size += length
            if call.size > _REQUEST:
                raise Malformed("a request is too large")
            if flags & _END_STREAM:
                return self._respond(stream)
        return False

    def _headers(self, kind: int, flags: int, stream: int, payload: bytes) -> bool:
        call = self._calls.setdefault(stream, _Call())
        if kind == _HEADERS:
            call.ends = bool(flags & _END_STREAM)
            if flags & _PADDED:
                if not payload or payload[0] >= len(payload):
                    raise Malformed("more padding than frame")
                payload = payload[1 : len(payload) - payload[0]]
            if flags & _PRIORITY:
                payload = payload[5:]
        call.block += payload
        if len(call.block) > _REQUEST or len(self._calls) > _CALLS:
            raise Malformed("too many headers")
        if flags & _END_HEADERS:
            call.path = dict(self._decoder.decode(call.block)).get(":path", call.path)
            call.block = b""
            if call.ends:
                return self._respond(stream)
        return False

    def _respond(self, stream: int) -> bool:
        call = self._calls.pop(stream)
        if call.path != PATH:
            self._refuse(stream, _UNIMPLEMENTED, f"there is {PATH} alone")
            return True
        health = self._health()
        if health.status == "unknown":
            self._refuse(stream, _UNAVAILABLE, "; ".join(health.reasons))
            return True
        message = response(health)
        self._send(_HEADERS, _END_HEADERS, stream, _status_ok())
        self._send(_DATA, 0, stream, struct.pack(">BI", 0, len(message)) + message)
        self._send(_HEADERS, _END_HEADERS | _END_STREAM, stream, _header("grpc-status", "0"))
        return True

    def _refuse(self, stream: int, code: int, words: str) -> None:
        block = _status_ok() + _header("grpc-status", str(code)) + _header("grpc-message", _escaped(words[:1000]))
        self._send(_HEADERS, _END_HEADERS | _END_STREAM, stream, block)

    def _take(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self._connection.recv(count - len(data))
            if not piece:
                raise ConnectionResetError
            data += piece
        return data

    def _send(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
        self._connection.sendall(head + payload)


def response(health: Health) -> bytes:
    """The message ``HealthCheckResponse`` for a node that passes or fails."""
    failed = [] if health.status == "pass" else [reason[:300] for reason in health.reasons]
    names = [reason.partition(":")[0] for reason in failed]
    output = json.dumps({"fail_count": len(failed), "failed_checks": names[:_SHOWN], "reasons": failed[:_SHOWN]})
    # Fields of protobuf: 1 success and 2 exit_code are numbers, and left out where they are 0; 3 and 4 are texts.
    words = failed[0] if failed else ""
    return (b"\x10\x01" if failed else b"\x08\x01") + _text(3, output) + (_text(4, words) if words else b"")


def _text(field_number: int, text: str) -> bytes:
    data = text.encode("utf-8", "replace")
    length, size = b"", len(data)
    while size > 0x7F:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([field_number << 3 | 2]) + length + bytes([size]) + data


def _status_ok() -> bytes:
    # Entry 8 of the static table is `:status: 200`.
    return b"\x88" + _header("content-type", "application/grpc")


def _header(name: str, value: str) -> bytes:
    """A header that nobody needs to remember (RFC 7541, 6.2.2)."""
    return b"\0" + b"".join(_short(text.encode("ascii")) for text in (name, value))


def _short(data: bytes) -> bytes:
    """A text of HPACK, not packed."""
    if len(data) < 0x7F:
        return bytes([len(data)]) + data
    rest, length = len(data) - 0x7F, b"\x7f"
    while rest > 0x7F:
        length += bytes([rest & 0x7F | 0x80])
        rest >>= 7
    return length + bytes([rest]) + data


def _escaped(text: str) -> str:
    """A text as gRPC has it in a header: bytes that cannot stand there as %XX."""
    return "".join(
        chr(byte) if 0x20 <= byte <= 0x7E and byte != 0x25 else f"%{byte:02X}"
        for byte in text.encode("utf-8", "replace")
    )
