"""JSON that others may have written, read strictly: whatever two readers could understand differently is an error.

Python's own reader also takes ``NaN``, numbers that no float holds, a name that occurs twice, and text that no file can
hold; and it answers deep nesting with an exception that is no ``ValueError``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
from typing import Any, Mapping

LARGEST = 256 << 20
"""Bytes. More than any document of ours, and any configuration or index, has."""
CHECKSUM = "sha256"
"""The key under which a document has its own checksum."""
_PART = 1 << 20
_LARGEST_NUMBER = 1 << 64
_DIGITS = len(str(_LARGEST_NUMBER)) - 1
"""Numbers with so many characters, or fewer, are smaller."""
_NESTED = 200
"""Levels: far more than any document of ours has, and far fewer than Python's own writer and others can follow."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> int:
    """A handle for reading. Raises ``OSError``, also (EINVAL) where the path leads to no regular file: it says what."""
    try:
        # A FIFO that nobody writes to holds an ordinary open.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        # A socket, or a device that nothing drives.
        raise _not_regular(os.stat(path).st_mode, path) from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise _not_regular(mode, path)
    os.set_blocking(handle, True)
    return handle


def _not_regular(mode: int, path: str | os.PathLike[str]) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file but a %s" % kind_of(mode), str(path))


def kind_of(mode: int) -> str:
    """What something with this ``st_mode`` is, which is no regular file."""
    for is_kind, name in ((stat.S_ISDIR, "directory"), (stat.S_ISFIFO, "FIFO"), (stat.S_ISSOCK, "socket")):
        if is_kind(mode):
            return name
    return "device"


def read_bytes(path: str | os.PathLike[str], limit: int = LARGEST, flags: int = 0) -> bytes:
    """The whole file. Raises ``OSError``, as ``open_regular`` does, and (EFBIG) where it holds more than ``limit``."""
    with os.fdopen(open_regular(path, flags), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        # Not up to the limit at once: that much memory is taken before a byte is read.
        content = stream.read(size + 1) if size <= limit else None
        while content is not None:
            more = stream.read(min(_PART, limit + 1 - len(content)))
            if not more:
                break
            content += more  # it has grown meanwhile, or its size says nothing
    if content is None or len(content) > limit:
        raise OSError(errno.EFBIG, "it is larger than %d bytes" % limit, str(path))
    return content


def read(path: str | os.PathLike[str], limit: int = LARGEST) -> Any:
    """The document in a file. Raises ``OSError`` as ``read_bytes`` does, ``ValueError`` as ``parse`` does."""
    try:
        text = read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    return parse(text)


def parse(text: str, odd_names: bool = False, repeated: bool = False) -> Any:
    """The document in ``text``. Raises ``ValueError``, which says in few words why it is none.

    ``odd_names``: its texts may hold bytes that are not UTF-8, as lone surrogates (names of files).
    ``repeated``: a program wrote it that may give a name twice, and the last one counts, as for all readers in Python.
    """
    try:
        document = json.loads(
            text,
            object_pairs_hook=None if repeated else unrepeated,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_whole,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    refuse_deep(document)
    if not odd_names and _SURROGATE.search(text):
        try:
            json.dumps(document, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it holds half a character (a lone surrogate)") from None
    return document


def checksum(document: Mapping[str, Any]) -> str:
    """SHA-256 over the canonical JSON (sorted keys, no blanks, UTF-8) without the checksum itself.

    It detects accidents and edits by hand; it is no signature.
    """
    body = {key: value for key, value in document.items() if key != CHECKSUM}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these names and values. Raises ``ValueError`` for a name that occurs twice."""
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError("it has `%s` twice" % name.encode("ascii", "backslashreplace").decode())
            seen.add(name)
    return made


def _no_constant(name: str) -> float:
    raise ValueError("%s is not a JSON number" % name)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("`%s` is too large a number" % digits[:40])
    return value


def _whole(digits: str) -> int:
    # A manifest of 100,000 files has 300,000 numbers, and all of them are short.
    if len(digits) > _DIGITS and (len(digits) > _DIGITS + 2 or abs(int(digits)) > _LARGEST_NUMBER):
        raise ValueError("`%s` is too large a number" % digits[:40])
    return int(digits)


def refuse_deep(document: Any) -> None:
    """Raises ``ValueError`` for a document that what reads it later could not follow to its end."""
    level = [document] if isinstance(document, (dict, list)) else []
    for _ in range(_NESTED):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise ValueError("it is nested too deeply")
