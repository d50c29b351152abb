"""Files that somebody damaged, edited or made up, drawn by Hypothesis from a sound one."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import strategies as st

from waiting import PATIENCE

PARTS = [
    *(bytes([byte]) for byte in b'{}[]",:\\0-.eE# \t\n\r\0\f\x7f\xff'),
    *(
        b"null",
        b"true",
        b"{}",
        b"[]",
        b'""',
        b"-1",
        b"0",
        b"1.5",
        b"1e999",
        b"-1e999",
        b"NaN",
        b"-Infinity",
        b"//",
        b"/*",
    ),
    *(b'"\\ud800"', b'"\\u0000"', "\u2028".encode(), b"\xef\xbb\xbf", b"\xc3\x28", b"9" * 5000, b"9" * 400, b"1" * 20),
    *(b"[" * 3000, b'{"a":' * 3000, b'"' * 3, b'"a": 1, ', b"\\u0041", b"../../", b"/etc/passwd"),
]
"""Parts of JSON, and what no reader expects."""

_MARK = "@mark@"
RAW = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-0",
    "1E5",
    "9" * 400,
    "-" + "9" * 5000,
    '"\\ud800"',
    "[" * 150 + "]" * 150,
]
"""Values as text that Python's own writer would not write."""
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 1, 2**31, 2**53, 2**63, 2**64 - 1]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(["", "..", "/", "../../etc/passwd", "a\0b", "a\nb", "\x1b[2J", "[red]", "nan", "1e999", "{{ 1 }}"]),
    st.sampled_from([[], {}, [[]], [{}], {"": None}, [None], {"a": {"b": {}}}]),
    st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=3)), max_size=3),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value of a document but the document itself."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


@st.composite
def edited(draw: st.DrawFn, document: Any, seal: Callable[[Any], None] | None = None) -> str:
    """The text of a document after edits of values and keys. ``seal``: what its author does last, such as a checksum."""
    document = json.loads(json.dumps(document))
    raw = None
    for _ in range(draw(st.integers(1, 3))):
        known = list(places(document))
        if not known:
            break
        *above, last = draw(st.sampled_from(known))
        parent = document
        for key in above:
            parent = parent[key]
        how = draw(st.sampled_from(["value", "raw", "remove", "add", "twice"]))
        if how == "value":
            parent[last] = deepcopy(draw(VALUES))
        elif how == "raw":
            raw, parent[last] = draw(st.sampled_from(RAW)), _MARK
        elif how == "remove":
            del parent[last]
        elif isinstance(parent, list):
            parent.insert(last, parent[last] if how == "twice" else deepcopy(draw(VALUES)))
        else:
            parent[draw(st.text(max_size=5))] = deepcopy(draw(VALUES))
    if seal is not None and raw is None and isinstance(document, dict):
        seal(document)
    text = json.dumps(document, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 2])))
    return text if raw is None else text.replace(f'"{_MARK}"', raw)


@st.composite
def cut(draw: st.DrawFn, content: bytes) -> bytes:
    """Content with changed bytes, cuts, and parts that were put in or moved."""
    made = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(made)))
        how = draw(st.sampled_from(["byte", "part", "remove", "move", "end", "over"]))
        if how == "byte" and at < len(made):
            made[at] = draw(st.integers(0, 255))
        elif how == "part":
            made[at:at] = draw(st.sampled_from(PARTS))
        elif how == "remove":
            del made[at : at + draw(st.integers(1, 30))]
        elif how == "move":
            start = draw(st.integers(0, len(made)))
            made[at:at] = made[start : start + draw(st.integers(1, 60))]
        elif how == "over":
            part = draw(st.sampled_from(PARTS))
            made[at : at + len(part)] = part
        else:
            del made[at:]
    return bytes(made)


def files(content: str, seal: Callable[[Any], None] | None = None) -> st.SearchStrategy[bytes]:
    """A file of JSON after all that may happen to it."""
    document = json.loads(content)
    texts = edited(document).map(_encoded)
    sealed = [edited(document, seal).map(_encoded)] if seal is not None else []
    return st.one_of(cut(content.encode()), texts, *sealed, st.binary(max_size=60), st.sampled_from(PARTS))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


CPU_SECONDS = 20.0
"""Of this process, whatever else the machine does. No reader needs a second."""


class Hangs(BaseException):
    """No ``Exception``, so that nothing takes it for an error of the file."""


@contextmanager
def no_hang() -> Iterator[None]:
    """Raises ``Hangs`` in what waits for as long as tests wait for anything, or computes for ``CPU_SECONDS``."""

    def stop(_: int, __: FrameType | None) -> None:
        raise Hangs("it does not end")

    timers = {signal.SIGALRM: (signal.ITIMER_REAL, PATIENCE), signal.SIGPROF: (signal.ITIMER_PROF, CPU_SECONDS)}
    before = {number: signal.signal(number, stop) for number in timers}
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for number, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


MEMORY = 1 << 30
"""Bytes. No reader of such a file needs a tenth of it."""


@contextmanager
def bounded_memory() -> Iterator[None]:
    """What takes ``MEMORY`` more than this process has gets a ``MemoryError``: a test does not take the machine's."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = used + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (wanted if soft == resource.RLIM_INFINITY else min(wanted, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
