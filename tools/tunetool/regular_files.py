"""Files that others wrote, read whole: a FIFO or a device in their place is refused, where ``open`` waits for ever."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tunetool.errors import UsageProblem
from tunetool.node.common.documents import LARGEST as JSON_BYTES
from tunetool.node.common.documents import kind_of, open_regular, read_bytes

__all__ = [
    "JSON_BYTES",
    "POINTER_BYTES",
    "Pointer",
    "below",
    "is_pointer",
    "kind_of",
    "open_regular",
    "read_bytes",
    "read_end",
    "read_json",
    "refuse_pointer",
    "refuse_pointers",
]
_POINTER = b"version https://git-lfs.github.com/spec/"
POINTER_BYTES = 1024
"""A Git LFS pointer is smaller than this, by the specification of Git LFS."""


class Pointer(UsageProblem):
    """Git put a Git LFS pointer in the place of the file: a few lines of text that say where its content lies."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"`{path}` is a Git LFS pointer, not the file itself",
            "`git lfs pull` in its clone brings the file; without Git LFS, download the file again",
        )


def is_pointer(start: bytes) -> bool:
    """Whether a file that begins so is a Git LFS pointer."""
    return start.startswith(_POINTER)


def refuse_pointer(path: Path, start: bytes) -> None:
    """Raises ``Pointer`` where the file at ``path``, which begins so, is one."""
    if is_pointer(start):
        raise Pointer(path)


def refuse_pointers(paths: Iterable[Path]) -> None:
    """Raises ``Pointer`` for the first of ``paths`` that is one; what cannot be read is left to its reader."""
    for path in paths:
        with suppress(OSError), os.fdopen(open_regular(path), "rb") as stream:
            refuse_pointer(path, stream.read(len(_POINTER)))


def below(directory: Path, name: str) -> Path:
    """The file ``name`` below ``directory``. Raises ``UsageProblem`` where ``..`` or a link leads out of it."""
    path = directory / name
    # Not `Path.resolve`, which raises for a link that leads to itself.
    if Path(os.path.realpath(directory)) not in Path(os.path.realpath(path)).parents:
        raise UsageProblem(f"`{path}` leads out of `{directory}`", "take the whole directory from where it was made")
    return path


def read_end(path: Path, count: int) -> bytes:
    """The last ``count`` bytes of the file, or all of a shorter one. Raises ``OSError`` as ``open_regular`` does."""
    with os.fdopen(open_regular(path), "rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - count))
        return stream.read()


def read_json(path: Path, limit: int = JSON_BYTES) -> Any:
    """The document in a file of UTF-8. Raises ``OSError`` as ``read_bytes`` does, ``ValueError`` if it is no JSON, and
    ``Pointer``.

    As tolerant as Python itself: a model's configuration may say ``Infinity``.
    """
    content = read_bytes(path, limit)
    refuse_pointer(path, content)
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
