"""Files that others wrote, read whole: a FIFO or a device in their place is refused, where ``open`` waits for ever."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tunetool.errors import UsageProblem
from tunetool.node.common.documents import LARGEST as JSON_BYTES
from tunetool.node.common.documents import open_regular, read_bytes

__all__ = ["JSON_BYTES", "below", "open_regular", "read_bytes", "read_end", "read_json"]


def below(directory: Path, name: str) -> Path:
    """The file ``name`` below ``directory``. Raises ``UsageProblem`` where ``..`` or a link leads out of it."""
    path = directory / name
    if directory.resolve() not in path.resolve().parents:
        raise UsageProblem(f"`{path}` leads out of `{directory}`", "take the whole directory from where it was made")
    return path


def read_end(path: Path, count: int) -> bytes:
    """The last ``count`` bytes of the file, or all of a shorter one. Raises ``OSError`` as ``open_regular`` does."""
    with os.fdopen(open_regular(path), "rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - count))
        return stream.read()


def read_json(path: Path, limit: int = JSON_BYTES) -> Any:
    """The document in a file of UTF-8. Raises ``OSError`` as ``read_bytes`` does, ``ValueError`` if it is no JSON.

    As tolerant as Python itself: a model's configuration may say ``Infinity``.
    """
    try:
        return json.loads(read_bytes(path, limit).decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
