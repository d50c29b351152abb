"""Files that others wrote, read whole: a FIFO or a device in their place is refused, where ``open`` waits for ever."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

_PART = 1 << 20
JSON_BYTES = 256 << 20
"""More than any configuration or index has."""


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> int:
    """A handle for reading. Raises ``OSError``, also (EINVAL) where the path leads to no regular file."""
    # A FIFO that nobody writes to holds an ordinary open.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    os.set_blocking(handle, True)
    return handle


def read_bytes(path: Path, limit: int) -> bytes:
    """The whole file. Raises ``OSError``, as ``open_regular`` does, and (EFBIG) where it holds more than ``limit``."""
    with os.fdopen(open_regular(path), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        # Not up to the limit at once: that much memory is taken before a byte is read.
        content = stream.read(size + 1) if size <= limit else None
        while content is not None and (more := stream.read(min(_PART, limit + 1 - len(content)))):
            content += more  # it has grown meanwhile, or its size says nothing
    if content is None or len(content) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit} bytes", str(path))
    return content


def read_json(path: Path, limit: int = JSON_BYTES) -> Any:
    """The document in a file of UTF-8. Raises ``OSError`` as ``read_bytes`` does, ``ValueError`` if it is no JSON."""
    try:
        return json.loads(read_bytes(path, limit).decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
