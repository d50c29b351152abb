"""What ft_launcher asks: HPACK by the examples of RFC 7541, the gRPC server by gRPC's own client, and nonsense."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tunetool.health.answer import PATH, PREFACE, answer_connection
from tunetool.health.hpack import Decoder, Malformed, unpacked
from tunetool.health.results import Health
from waiting import PATIENCE

FAILED = ("array.members: 7 of 8 members; missing `S1`", "drives.link: `S2` at 8 GT/s")
# RFC 7541, appendix C.4 and C.6: three requests on one connection, then texts of its responses.
REQUESTS = (
    ("828684418cf1e3c2e5f23a6ba0ab90f4ff", "/"),
    ("828684be5886a8eb10649cbf", "/"),
    ("828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf", "/index.html"),
)
PACKED = {
    "a8eb10649cbf": "no-cache",
    "6402": "302",
    "d07abe941054d444a8200595040b8166e082a62d1bff": "Mon, 21 Oct 2013 20:13:21 GMT",
    "9d29ad171863c78f0b97c8e9ae82ae43d3": "https://www.example.com",
    "94e7821dd7f2e6c7b335dfdfcd5b3960d5af27087f3672c1ab270fb5291f9587316065c003ed4ee5b1063d5007": (
        "foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1"
    ),
}


def test_headers_of_the_rfc_are_read() -> None:
    decoder = Decoder()
    blocks = [dict(decoder.decode(bytes.fromhex(block))) for block, _ in REQUESTS]
    assert [block[":path"] for block in blocks] == [path for _, path in REQUESTS]
    assert [block[":authority"] for block in blocks] == ["www.example.com"] * 3
    assert blocks[2]["custom-key"] == "custom-value"
    assert {code: unpacked(bytes.fromhex(code)) for code in PACKED} == PACKED


def test_an_entry_that_was_pushed_out_is_gone() -> None:
    decoder = Decoder()
    long = b"\x40\x01a" + b"\x7f\x81\x1f" + b"x" * 4096  # 127 + 3969 bytes: more than the table holds, so it is empty
    decoder.decode(b"\x40\x01b\x01c")
    assert decoder.decode(b"\xbe") == [("b", "c")]
    decoder.decode(long)
    with pytest.raises(Malformed):
        decoder.decode(b"\xbe")


@contextmanager
def endpoint(directory: Path, health: Callable[[], Health]) -> Iterator[Path]:
    """A socket whose every connection is served, as systemd does it with ``Accept=yes``."""
    path = directory / "health.sock"
    threads = []
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def accept() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                thread = threading.Thread(target=answer_connection, args=(connection.detach(), health))
                thread.start()
                threads.append(thread)

        threads.append(threading.Thread(target=accept))
        threads[0].start()
        try:
            yield path
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(PATIENCE)


def fields(message: bytes) -> dict[int, Any]:
    """The fields of a message of protobuf: numbers and texts."""

    def number(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value |= (message[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if not message[at - 1] & 0x80:
                return value, at

    found: dict[int, Any] = {}
    at = 0
    while at < len(message):
        key, at = number(at)
        value, at = number(at)
        if key & 7 == 2:
            found[key >> 3], at = message[at : at + value].decode(), at + value
        else:
            found[key >> 3] = value
    return found


def ask(path: Path, method: str = PATH, times: int = 1) -> list[dict[int, Any]]:
    """What nvidia-resiliency-ext's NodeHealthCheck does: a channel, and a call with the argument ``--no-slurm``."""
    with grpc.insecure_channel(f"unix://{path}") as channel:
        call = channel.unary_unary(method)
        return [fields(call(b"\x0a\x0a--no-slurm", timeout=PATIENCE)) for _ in range(times)]


def test_a_healthy_node_has_no_failures(tmp_path: Path) -> None:
    with endpoint(tmp_path, lambda: Health("pass")) as path:
        # Several calls on one connection: the later ones name what was said before by its number.
        answers = ask(path, times=5)
    for answer in answers:
        assert set(answer) == {1, 3}
        assert answer[1] == 1
        assert json.loads(answer[3]) == {"fail_count": 0, "failed_checks": [], "reasons": []}


def test_a_sick_node_names_its_checks(tmp_path: Path) -> None:
    with endpoint(tmp_path, lambda: Health("fail", FAILED)) as path:
        (answer,) = ask(path)
    # success is false, which protobuf leaves out.
    assert set(answer) == {2, 3, 4}
    assert (answer[2], answer[4]) == (1, FAILED[0])
    output = json.loads(answer[3])
    assert output["fail_count"] == 2
    assert output["failed_checks"] == ["array.members", "drives.link"]


@pytest.mark.parametrize("many", [1, 30, 500])
def test_however_many_fail_the_answer_is_whole(tmp_path: Path, many: int) -> None:
    reasons = [f"check.{number}: " + "\u00fc" * 400 for number in range(many)]
    with endpoint(tmp_path, lambda: Health("fail", reasons)) as path:
        (answer,) = ask(path)
    assert json.loads(answer[3])["fail_count"] == many


def test_the_unknown_is_no_answer_and_another_call_is_refused(tmp_path: Path) -> None:
    with endpoint(tmp_path, lambda: Health("unknown", ["there is no result yet: 100 %"])) as path:
        with pytest.raises(grpc.RpcError) as unknown:
            ask(path)
        with pytest.raises(grpc.RpcError) as other:
            ask(path, "/nvhcd.HealthCheckService/Reboot")
    assert unknown.value.code() == grpc.StatusCode.UNAVAILABLE
    assert unknown.value.details() == "there is no result yet: 100 %"
    assert other.value.code() == grpc.StatusCode.UNIMPLEMENTED


def said_to(data: bytes) -> bytes:
    """The answer to these bytes, after which the caller says nothing more."""
    ours, theirs = socket.socketpair()
    with ours:
        served = threading.Thread(target=answer_connection, args=(theirs.detach(), lambda: Health("pass")))
        served.start()
        ours.settimeout(PATIENCE)
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        answer = b""
        # It may have closed the connection before it read everything.
        with suppress(ConnectionResetError):
            while piece := ours.recv(65536):
                answer += piece
        served.join(PATIENCE)
        assert not served.is_alive()
    return answer


FRAMES = st.builds(
    lambda kind, flags, stream, payload: (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    ),
    st.integers(0, 11),
    st.integers(0, 255),
    st.integers(0, 5),
    st.binary(max_size=40) | st.sampled_from([bytes.fromhex(block) for block, _ in REQUESTS]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(FRAMES | st.binary(max_size=20), max_size=8))
@example([b"\xff" * 9])
@example([b"\0\0\0\x01\x0c\0\0\0\1"])  # headers of no byte, padded
@example([b"\0\0\1\x01\x05\0\0\0\1\x3f"])  # a table's size without its end
def test_nonsense_ends_the_connection_and_nothing_else(frames: list[bytes]) -> None:
    # An exception in the thread fails the test (pytest's own warning, as an error).
    answer = said_to(PREFACE + b"".join(frames))
    while answer:
        length = int.from_bytes(answer[:3], "big")
        assert len(answer) >= 9 + length
        answer = answer[9 + length :]


def test_a_ping_is_answered_with_its_bytes() -> None:
    """gRPC's clients measure the connection by pings, and close one that does not answer."""
    answer = said_to(PREFACE + b"\0\0\x08\6\0\0\0\0\0ping-123")
    assert answer.endswith(b"\0\0\x08\6\1\0\0\0\0ping-123")


def test_another_protocol_gets_no_answer() -> None:
    assert said_to(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") == b""
    assert said_to(b"") == b""


def test_the_program_serves_its_standard_input() -> None:
    """Without settings nothing is known: the answer is gRPC's UNAVAILABLE, by the same door as under systemd."""
    ours, theirs = socket.socketpair()
    block = b"\x83\x86\x04" + bytes([len(PATH)]) + PATH.encode()
    frame = len(block).to_bytes(3, "big") + b"\1\5\0\0\0\1" + block
    with ours, theirs:
        child = subprocess.Popen([sys.executable, "-m", "tunetool.health", "answer"], stdin=theirs)
        theirs.close()
        ours.settimeout(PATIENCE)
        ours.sendall(PREFACE + frame)
        ours.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := ours.recv(65536):
            answer += piece
        assert child.wait(PATIENCE) == 0
    assert b"grpc-status\x0214" in answer
